"""Records that cannot be read, or whose work fails: the first ends the run with a hint, or all are counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk
from mindspeed_llm.tasks.preprocess.command.record_mistakes import CheckedWork
from mindspeed_llm.tasks.preprocess.readers import Mistake, Record
from tests.tasks.preprocess.command.toys import SFT, preprocess, summary, toys

__all__ = ["toys"]
GOOD = '{"instruction": "Say it.", "output": "it"}'
LINES = [GOOD, '{"instruction": ', "[1]", GOOD, '{"instruction": "\\ud800', '{"a": ' * 5000]
TALK = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}


def test_broken_lines_are_counted(toys: Path) -> None:
    content = "\n".join([*LINES, GOOD]).encode() + b'\n{"instruction": "\xff"}\n'
    (toys / "broken.jsonl").write_bytes(content)
    for argv in ([], ["--workers", "2"], ["--n-subs", "3"]):
        preprocess(*SFT, "--on-bad-record", "skip", "--overwrite-cache", *argv, source="broken.jsonl")
        made = summary(toys / "out")
        assert made["num_records"] == 8 and made["num_samples"] == 3
        assert made["skipped"] == {
            "bad record: not valid JSON": 2,
            "bad record: no object with named columns": 1,
            "bad record: JSON that is nested too deeply": 1,
            "bad record: text that is not valid UTF-8": 1,
        }
        assert made["first_skipped"]["bad record: not valid JSON"] == ["broken.jsonl:2", "broken.jsonl:5"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_first_mistake_ends_the_run_with_a_hint(toys: Path, workers: str) -> None:
    (toys / "broken.jsonl").write_text("\n".join([GOOD] * 30 + LINES), encoding="utf-8")
    hint = r"\. --on-bad-record skip leaves such records out and counts them$"
    with pytest.raises(UserError, match=r"^broken\.jsonl:32: not valid JSON .*" + hint):
        preprocess(*SFT, "--workers", workers, source="broken.jsonl")
    (toys / "broken.jsonl").write_text("\n".join([GOOD] * 30 + ['{"instruction": "x"}', *LINES]), encoding="utf-8")
    with pytest.raises(UserError, match=r"^broken\.jsonl:31: .*no key 'output'.*" + hint):
        preprocess(*SFT, "--workers", workers, source="broken.jsonl")


def test_json_text_within_a_record_may_be_too_deep(toys: Path) -> None:
    deep = TALK | {"tools": "[" * 5000}
    (toys / "deep.jsonl").write_text("\n".join(map(json.dumps, (TALK, deep, TALK))), encoding="utf-8")
    argv = ["--handler-name", "OpenAIInstructionHandler", "--prompt-type", "qwen3"]
    with pytest.raises(UserError, match=r"deep\.jsonl:2: "):
        preprocess(*argv, source="deep.jsonl")
    preprocess(*argv, "--on-bad-record", "skip", source="deep.jsonl")
    assert summary(toys / "out")["num_samples"] == 2


class _Deep:
    """Work that goes too deep on records with `deep`, and finds those with `wrong` wrong."""

    keys = ("x",)

    def __call__(self, records: Sequence[Record]) -> Chunk:
        for record in records:
            if "deep" in record.data:
                raise RecursionError
            if "wrong" in record.data:
                raise UserError(f"{record.where}: wrong")
        ones = np.ones(len(records), np.int32)
        return Chunk({"x": ones}, {"x": ones}, len(records))


def _records(*keys: str) -> list[Record]:
    file = Path("a.jsonl")
    return [
        Record(file, line, {}, mistake=Mistake("unreadable", f"a.jsonl:{line}: unreadable"))
        if key == "unreadable"
        else Record(file, line, {key: 1})
        for line, key in enumerate(keys, start=1)
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("good", "deep", "wrong", "unreadable"), "2: JSON that is nested too deeply"),
        (("good", "wrong", "deep", "unreadable"), "2: wrong"),
        (("unreadable", "wrong", "deep"), "1: unreadable"),
        (("good", "unreadable", "deep"), "2: unreadable"),
    ],
)
def test_the_first_of_several_is_named(keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=f"a.jsonl:{message}.* --on-bad-record skip"):
        CheckedWork(_Deep(), skips=False)(_records(*keys))


def test_those_that_go_too_deep_are_counted() -> None:
    chunk = CheckedWork(_Deep(), skips=True)(_records("good", "deep", "unreadable", "good"))
    assert chunk.num_records == 4 and len(chunk.lengths["x"]) == 2
    assert sorted(chunk.skipped) == [
        ("bad record: JSON that is nested too deeply", "a.jsonl:2"),
        ("bad record: unreadable", "a.jsonl:3"),
    ]
