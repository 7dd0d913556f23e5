"""Every sample exactly once per epoch, whatever interrupts a run: the multiset of samples over three epochs is exact.

Ranks are simulated one after the other; a run is a list of parts, each with its ranks, its micro batch size, its
accumulation and the number of optimizer steps after which it was interrupted.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.fsdp2.data.data_factory import DataFactory
from mindspeed_llm.fsdp2.data.order import DataPosition
from tests.fsdp2.data.helpers import make_config, write_jsonl
from tests.support.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer(pad_token="<pad>")


@dataclass(frozen=True)
class Part:
    """A start of the run. `steps` is None where it trains to its end."""

    ranks: int
    micro: int
    accumulation: int
    steps: int | None = None
    max_steps: int = -1
    epochs: float = 3.0


def take(folder: Path, data: dict[str, Any], parts: list[Part], **training: Any) -> tuple[list[list[tuple]], int]:
    """The samples of every step (in any order within it), and the samples of an epoch."""
    position, batches, per_epoch = DataPosition(), [], 0
    for part in parts:
        config = make_config(
            folder,
            data,
            per_device_train_batch_size=part.micro,
            gradient_accumulation_steps=part.accumulation,
            max_steps=part.max_steps,
            num_train_epochs=part.epochs,
            dataloader_pin_memory=False,
            **training,
        )
        sources = [
            DataFactory(config, TOKENIZER)
            .build(
                rank=rank,
                world_size=part.ranks,
                global_batch_size=part.ranks * part.micro * part.accumulation,
                start=position,
            )
            .train
            for rank in range(part.ranks)
        ]
        total = sources[0].total_steps(part.epochs, part.max_steps)
        last = total if part.steps is None else min(position.step + part.steps, total)
        per_epoch = sources[0].num_samples
        steps = zip(*(source.micro_batches(position.step) for source in sources), strict=True)
        taken = 0
        for step in itertools.islice(steps, last - position.step):
            micro_batches = [batch for rank in step for batch in rank]
            batches.append([row for batch in micro_batches for row in _rows(batch)])
            taken += sum(batch["num_samples"] for batch in micro_batches)
            assert len(batches[-1]) == sum(batch["num_samples"] for batch in micro_batches)
        assert len(batches) == last
        position = DataPosition(step=last, samples=position.samples + taken, layouts=sources[0].layouts)
    return batches, per_epoch


def _rows(batch: dict[str, Any]) -> list[tuple]:
    rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    return [(*ids, *labels) for ids, labels in rows if any(label != -100 for label in labels)]


def samples(rows: Iterable[tuple]) -> Counter:
    """How often each row was taken; padding at the end, which depends on the neighbours, does not count."""
    return Counter(tuple(value for value in row if value not in (-100, TOKENIZER.pad_token_id)) for row in rows)


def in_order(batches: list[list[tuple]]) -> list[tuple]:
    """The rows of all batches."""
    return list(itertools.chain.from_iterable(batches))


@pytest.fixture
def conversations(tmp_path: Path) -> dict[str, Any]:
    file = write_jsonl(tmp_path / "a.jsonl", [{"instruction": f"q{i}", "output": f"answer {i}"} for i in range(37)])
    return {"dataset": {"file_name": file}, "template": "default", "cutoff_len": 64}


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    source = random.Random(0)
    rows = [{"text": "".join(source.choices("abcdefghij", k=7 + i))} for i in range(41)]
    file = write_jsonl(tmp_path / "t.jsonl", rows)
    return {"dataset": {"file_name": file}, "data_manager_type": "mg", "cutoff_len": 16, "append_eod": True}


# 37 records, 3 epochs, 111 samples: whatever the parts are, 111 is no multiple of their batches.
INTERRUPTED = [
    [Part(1, 4, 1)],
    [Part(2, 2, 1, 5), Part(2, 2, 1)],
    [Part(2, 1, 2, 7), Part(4, 1, 1, 9), Part(1, 2, 2)],
    [Part(3, 1, 1, 11), Part(2, 5, 1, 1), Part(4, 1, 3, 3), Part(1, 1, 1)],  # other global batches too
    [Part(2, 2, 2, 1), Part(2, 2, 2, 1), Part(2, 2, 2, 1), Part(3, 1, 2, 1), Part(1, 8, 1)],
]


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        *((parts, {}) for parts in INTERRUPTED),
        (INTERRUPTED[3], {"disable_shuffling": True}),
        (INTERRUPTED[2], {"dataloader_num_workers": 2}),
    ],
)
def test_records_come_once_per_epoch(
    tmp_path: Path, conversations: dict[str, Any], parts: list[Part], options: dict[str, Any]
) -> None:
    batches, per_epoch = take(tmp_path, conversations, parts, **options)
    assert per_epoch == 37
    found = samples(in_order(batches))
    assert len(found) == 37 and set(found.values()) == {3}
    # After any step, too: what has been taken is whole epochs and a part of the next one.
    for end in range(1, len(batches) + 1):
        taken = samples(in_order(batches[:end]))
        epochs, rest = divmod(sum(taken.values()), 37)
        assert Counter({row: number - epochs for row, number in taken.items() if number != epochs}).total() == rest
        assert set(taken.values()) <= {epochs, epochs + 1}


@pytest.mark.parametrize("packing", ["packing", "neat_packing"])
def test_packed_rows_come_once_per_epoch(tmp_path: Path, conversations: dict[str, Any], packing: str) -> None:
    whole, per_epoch = take(tmp_path, {**conversations, packing: True}, [Part(1, 1, 1)])
    parts = [Part(2, 1, 1, 3), Part(1, 3, 1, 2), Part(4, 1, 1)]
    batches, _ = take(tmp_path, {**conversations, packing: True}, parts)
    assert samples(in_order(batches)) == samples(in_order(whole)) and len(in_order(whole)) == 3 * per_epoch


def test_fixed_length_samples_come_once(tmp_path: Path, texts: dict[str, Any]) -> None:
    """Manager `mg`: each position of the sample index, which is laid out over all epochs jointly, exactly once."""
    whole, per_epoch = take(tmp_path, texts, [Part(1, 1, 1)], stage="pt")
    expected = in_order(whole)
    assert len(expected) == 3 * per_epoch
    for parts in INTERRUPTED[1:]:
        batches, _ = take(tmp_path, texts, parts, stage="pt")
        # In the same order, batch by batch: no position twice, none left out.
        place = 0
        for batch in batches:
            assert Counter(batch) == Counter(expected[place : place + len(batch)])
            place += len(batch)
        assert place == len(expected)


def test_training_longer_than_it_was_begun_for(tmp_path: Path, texts: dict[str, Any]) -> None:
    """What a resumed run needs beyond its first layout comes from a further one; nothing of the first is lost."""
    begun, per_epoch = take(tmp_path, texts, [Part(2, 2, 1, max_steps=20)], stage="pt")
    first = in_order(begun)
    longer = [Part(2, 2, 1, 13, max_steps=20), Part(4, 1, 1, 9, max_steps=30), Part(1, 2, 3, max_steps=35)]
    batches, _ = take(tmp_path, texts, longer, stage="pt")
    assert [len(batch) for batch in batches] == [4] * 22 + [6] * 13
    rows = in_order(batches)
    assert Counter(rows[: len(first)]) == Counter(first)
    # Lengths of the layouts: 80 samples, then up to 30 steps (13 * 4 + 17 * 4 = 120), then up to 35 (22 * 4 + 13 * 6).
    assert len(rows) == 166
    second, _ = take(tmp_path, texts, [Part(2, 2, 1, 13, max_steps=20), Part(4, 1, 1, max_steps=30)], stage="pt")
    assert Counter(rows[:120]) == Counter(in_order(second))
    # One epoch of the text, in a layout of its own, has no row twice: rows tell positions apart here.
    whole, _ = take(tmp_path, texts, [Part(1, 1, 1, max_steps=per_epoch)], stage="pt")
    assert max(samples(in_order(whole)).values()) == 1


def test_records_beyond_max_steps_that_was_raised(tmp_path: Path, conversations: dict[str, Any]) -> None:
    parts = [Part(2, 2, 1, max_steps=10), Part(1, 3, 1, max_steps=20), Part(4, 1, 1, max_steps=30)]
    batches, _ = take(tmp_path, conversations, parts)
    assert [len(batch) for batch in batches] == [4] * 10 + [3] * 10 + [4] * 10
    # 110 samples: all but one of three epochs.
    assert sorted(samples(in_order(batches)).values()) == [2] + [3] * 36


@pytest.mark.parametrize("manager", ["lf", "mg"])
def test_more_epochs_than_it_was_begun_for(
    tmp_path: Path, conversations: dict[str, Any], texts: dict[str, Any], manager: str
) -> None:
    """The last batch of the first epoch is not full; the next part goes on behind it."""
    data, training = (conversations, {}) if manager == "lf" else (texts, {"stage": "pt"})
    parts = [Part(2, 2, 1, epochs=1.0), Part(3, 1, 1, 3, epochs=2.0), Part(2, 2, 1, epochs=2.0)]
    batches, per_epoch = take(tmp_path, data, parts, **training)
    assert per_epoch % 4
    first = in_order(batches)[:per_epoch]
    assert max(samples(first).values()) == 1
    assert sum(samples(in_order(batches)).values()) == 2 * per_epoch
    if manager == "lf":
        assert set(samples(in_order(batches)).values()) == {2}
