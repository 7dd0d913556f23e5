"""The demo's text: the same bytes every time, nothing held out that is trained on, enough of it for the evaluation."""

import json
from pathlib import Path

import pytest

from scripts import demo_text


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["text", "alpaca"])
def test_same_bytes_every_time(tmp_path: Path, kind: str) -> None:
    for name in ("first", "second"):
        assert demo_text.main(["--out", str(tmp_path / name), "--format", kind]) == 0
    for file in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == ["eval.jsonl", "train.jsonl"]


def test_every_topic_is_in_exactly_one_part(tmp_path: Path) -> None:
    demo_text.main(["--out", str(tmp_path)])
    train, held_out = read(tmp_path / "train.jsonl"), read(tmp_path / "eval.jsonl")
    topics = demo_text.read_topics()
    assert {record["topic"]: record["text"] for record in [*train, *held_out]} == topics
    assert len(train) + len(held_out) == len(topics)
    assert len(train) > 5 * len(held_out)


def test_held_out_part_fills_the_sequences(tmp_path: Path) -> None:
    for sequences in (1, 8, 16):
        demo_text.main(["--out", str(tmp_path), "--eval-sequences", str(sequences), "--sequence-length", "256"])
        chars = sum(len(record["text"]) for record in read(tmp_path / "eval.jsonl"))
        # Even at 6 characters a token, far above what vocabularies reach on this text.
        assert chars >= sequences * 256 * 6


def test_alpaca_records(tmp_path: Path) -> None:
    demo_text.main(["--out", str(tmp_path), "--format", "alpaca"])
    records = read(tmp_path / "train.jsonl")
    assert len(records) >= 80
    assert all(set(record) == {"instruction", "input", "output"} and record["output"].strip() for record in records)


def test_split_by_hand() -> None:
    topics = {f"{number:02}": "x" * 10 for number in range(20)}
    train, held_out = demo_text.split_topics(topics, 25)
    assert held_out == ["00", "08", "16"]
    assert train == [name for name in topics if name not in held_out]


def test_more_than_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        demo_text.main(["--out", str(tmp_path / "out"), "--eval-sequences", "10000"])
    assert exit_info.value.code == 2
    assert "too little text" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
