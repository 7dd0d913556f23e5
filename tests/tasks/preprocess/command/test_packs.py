"""Packs against arithmetic by hand and against the samples that went in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.command import packs
from mindspeed_llm.tasks.preprocess.command.packs import write_packs
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter


def _part(folder: Path, samples: list[list[int]]) -> Path:
    """A part whose labels are the ids with the first of each sample masked."""
    folder.mkdir()
    for key in ("input_ids", "labels"):
        with IndexedWriter(folder / key) as writer:
            for sample in samples:
                ids = np.array(sample, np.int32)
                if key == "labels":
                    ids = np.concatenate([[-100], ids[1:]])
                writer.add(ids)
    return folder


def _read(target: Path) -> dict[str, list[list[int]]]:
    readers = {key: IndexedReader(f"{target}_{key}") for key in packs.PACK_KEYS}
    return {key: [reader[i].tolist() for i in range(len(reader))] for key, reader in readers.items()}


def _check_by_hand(tmp_path: Path, neat: bool) -> None:
    parts = [_part(tmp_path / "a", [[11, 12, 13], [21, 22]]), _part(tmp_path / "b", [[31, 32, 33, 34, 35, 36], [41]])]
    assert write_packs(parts, tmp_path / "out", capacity=6, pad_id=0, neat=neat) == 2
    # The longest first (it fills a pack), then the longest that fits: 3 + 2 + 1.
    assert _read(tmp_path / "out") == {
        "input_ids": [[31, 32, 33, 34, 35, 36], [11, 12, 13, 21, 22, 41]],
        "labels": [[-100, 32, 33, 34, 35, 36], [-100, 12, 13, -100, 22, -100]],
        "attention_mask": [[1] * 6, [1, 1, 1, 2, 2, 3] if neat else [1] * 6],
    }
    write_packs(parts[:1], tmp_path / "out", capacity=8, pad_id=9, neat=neat)
    assert _read(tmp_path / "out") == {
        "input_ids": [[11, 12, 13, 21, 22, 9, 9, 9]],
        "labels": [[-100, 12, 13, -100, 22, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 2, 2, 0, 0, 0] if neat else [1] * 8],
    }


@pytest.mark.parametrize("neat", [False, True])
def test_by_hand(tmp_path: Path, neat: bool) -> None:
    _check_by_hand(tmp_path, neat)


def _from_zero(original: Callable[..., Any]) -> Callable[..., Any]:
    def places(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        place, segment = original(*arguments)
        return place, segment - 1

    return places


def _shifted(original: Callable[..., Any]) -> Callable[..., Any]:
    def places(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        place, segment = original(*arguments)
        return np.roll(place, 1), segment

    return places


MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "padding carries loss": ("IGNORE_INDEX", lambda _: 0),
    "numbers of samples begin at 0": ("_places", _from_zero),
    "tokens out of order": ("_places", _shifted),
    "a pack is lost": ("pack_window", lambda original: lambda lengths, capacity: original(lengths, capacity)[:-1]),
    "a sample for each pack": ("pack_window", lambda _: lambda lengths, capacity: [[i] for i in range(len(lengths))]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    attribute, mutate = MUTANTS[name]
    monkeypatch.setattr(packs, attribute, mutate(getattr(packs, attribute)))
    with pytest.raises((AssertionError, IndexError, ValueError)):
        _check_by_hand(tmp_path, neat=True)


@pytest.mark.parametrize("seed", range(3))
def test_every_token_once_whatever_the_parts(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.RandomState(seed)
    samples = [[number, *random.randint(1, 500, size=random.randint(0, 32))] for number in range(1000, 1200)]
    monkeypatch.setattr(packs, "_WINDOW_TOKENS", 700)
    monkeypatch.setattr(packs, "_WINDOW_PACKS", 1)
    monkeypatch.setattr(packs, "_BLOCK", 30)
    whole = [_part(tmp_path / "whole", samples)]
    write_packs(whole, tmp_path / "one", capacity=33, pad_id=0, neat=True)
    split = [_part(tmp_path / f"part{i}", samples[i * 70 : (i + 1) * 70]) for i in range(4)]
    write_packs(split, tmp_path / "many", capacity=33, pad_id=0, neat=True)
    for key in packs.PACK_KEYS:
        for suffix in (".bin", ".idx"):
            assert (tmp_path / f"one_{key}{suffix}").read_bytes() == (tmp_path / f"many_{key}{suffix}").read_bytes()
    found: list[list[int]] = []
    packed = _read(tmp_path / "one")
    for ids, labels, segments in zip(*(packed[key] for key in ("input_ids", "labels", "attention_mask")), strict=True):
        assert len(ids) == 33 and segments == sorted(segments, key=lambda number: (number == 0, number))
        for number in range(1, max(segments) + 1):
            places = [i for i, segment in enumerate(segments) if segment == number]
            sample = [ids[i] for i in places]
            assert [labels[i] for i in places] == [-100, *sample[1:]]
            found.append(sample)
        assert {(ids[i], labels[i]) for i, segment in enumerate(segments) if segment == 0} <= {(0, -100)}
    assert sorted(found) == samples
    # Windows limit what is packed together, and packs are dense all the same.
    tokens = sum(map(len, samples))
    assert tokens / 33 <= len(packed["input_ids"]) <= 1.15 * tokens / 33
