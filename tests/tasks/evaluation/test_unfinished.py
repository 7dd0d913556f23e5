"""Samples on the disk: whole lines alone count, and only those that the same settings have left."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from mindspeed_llm.tasks.evaluation import run
from mindspeed_llm.tasks.evaluation.benchmarks.mmlu import MMLU
from mindspeed_llm.tasks.evaluation.judge import SampleResult
from mindspeed_llm.tasks.evaluation.ranks import Ranks
from mindspeed_llm.tasks.evaluation.unfinished import Unfinished
from tests.tasks.evaluation.data import write_mmlu
from tests.tasks.evaluation.models import Oracle, task_of

FACTS = {"fingerprint": "f", "num_fewshot": 5, "prompts_hash": "p"}


def _sample(index: int, **more: object) -> SampleResult:
    fields = {"raw": (-1.5, -0.1), "choices": ("no", "yes"), "extracted": {"acc": "yes"}, "correct": {"acc": True}}
    return SampleResult(**{"subject": "s", "index": index, "prompt": "", "gold": "yes", **fields, **more})


SAMPLES = [_sample(0), _sample(1, raw="text\n第", choices=(), cut_tokens=3), _sample(2, is_tie=True)]
SAMPLES.append(_sample(3, raw="<think>", choices=(), thought_has_no_end=True))


def _store(folder: Path, **facts: object) -> Unfinished:
    return Unfinished(folder, {"boolq": {**FACTS, **facts}}, Ranks())


def _write(folder: Path) -> Path:
    store = _store(folder)
    store.add("boolq", SAMPLES[:2])
    store.add("boolq", SAMPLES[2:])
    store.close()
    (file,) = (folder / "unfinished").iterdir()
    return file


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    _write(tmp_path)
    assert _store(tmp_path).read()["boolq"] == {(sample.subject, sample.index): sample for sample in SAMPLES}
    _store(tmp_path).remove()
    assert not (tmp_path / "unfinished").exists()


def test_no_half_line_is_believed_wherever_a_kill_cuts(tmp_path: Path) -> None:
    file = _write(tmp_path)
    content = file.read_bytes()
    ends = [place for place, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == 3
    for cut in range(len(content) + 1):
        file.write_bytes(content[:cut])
        found = _store(tmp_path).read()["boolq"]
        assert len(found) == (0 if cut <= ends[1] else 2 if cut <= ends[2] else 4)
    # What a kill has left of a line is gone before the next one is written.
    for cut in (0, ends[0] // 2, ends[1] + 5, ends[2]):
        file.write_bytes(content[:cut])
        store = _store(tmp_path)
        store.add("boolq", SAMPLES[2:])
        store.close()
        assert {index for _, index in _store(tmp_path).read()["boolq"]} >= {2, 3}
        assert all(isinstance(json.loads(line), dict) for line in file.read_bytes().splitlines())


def test_garbage_is_not_believed(tmp_path: Path) -> None:
    file = _write(tmp_path)
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([lines[0], b"\0" * len(lines[1]), lines[2], b""]))
    assert {index for _, index in _store(tmp_path).read()["boolq"]} == {2, 3}


def test_other_settings_begin_anew_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path)
    logging.getLogger("mindspeed_llm").propagate = True
    assert _store(tmp_path, num_fewshot=3).read() == {"boolq": {}}
    assert "are of another evaluation (num_fewshot 5, now 3); they are left alone" in caplog.text
    assert len(_store(tmp_path).read()["boolq"]) == 4


def test_what_other_ranks_have_left_counts_and_a_block_is_asked_as_a_whole(tmp_path: Path) -> None:
    """Two ranks were killed: one has finished two blocks, the other has lost a line of its third."""
    data = tmp_path / "data"
    write_mmlu(data, subjects=("a", "b", "c", "d"), count=4)
    task = task_of(MMLU, MMLU.load(data / "test"))
    right = Oracle([task])
    (whole,) = run.evaluate([task], right, Ranks())

    def store(rank: int) -> Unfinished:
        ranks = Ranks()
        ranks.rank = rank
        return Unfinished(tmp_path, {"mmlu": FACTS}, ranks)

    by_subject = {name: [sample for sample in whole.samples if sample.subject == name] for name in "abcd"}
    for rank, name, count in ((0, "a", 4), (3, "c", 4), (3, "d", 2)):
        kept = store(rank)
        kept.add("mmlu", by_subject[name][:count])
        kept.close()
    assert len(list((tmp_path / "unfinished").iterdir())) == 2
    asked = []

    class Counting(Oracle):
        def answer(self, questions, on_answer) -> None:
            asked.append([question.prompt for question in questions])
            super().answer(questions, on_answer)

    (result,) = run.evaluate([task], Counting([task]), Ranks(), unfinished=store(0))
    assert result == whole
    prompts = [item.question.prompt for item in task.items]
    assert asked == [prompts[4:8], prompts[12:16]]
