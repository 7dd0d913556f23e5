"""Write a small text data set from real English on this machine: the topics of Python's own `help()`.

    python scripts/demo_text.py --out output/data/pydoc

Writes train.jsonl and eval.jsonl, one object {"text": ..., "topic": ...} a line. Topics are whole documents; every
eighth one (in the order of their names) is held out, until the held-out part fills the sequences asked for. The same
Python gives the same bytes; the texts differ a little from one Python release to the next.

With --format alpaca the records are questions and answers instead: {"instruction": ..., "input": "", "output": ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

# Each token of English stands for 3 to 5 characters in the usual vocabularies: 6 leaves room.
CHARS_PER_TOKEN = 6
HELD_OUT_EVERY = 8


def read_topics() -> dict[str, str]:
    """Return topic name -> text of the standard library's `pydoc_data.topics`, in the order of the names."""
    from pydoc_data.topics import topics

    return {name: topics[name].strip() + "\n" for name in sorted(topics)}


def split_topics(topics: dict[str, str], eval_chars: int) -> tuple[list[str], list[str]]:
    """Return (names for training, names held out): every eighth topic until ``eval_chars`` characters are held out.

    Raises:
        ValueError: the topics hold fewer characters than are to be held out.
    """
    held_out: list[str] = []
    chars = 0
    names = list(topics)
    for first in range(HELD_OUT_EVERY):
        for name in names[first::HELD_OUT_EVERY]:
            if chars >= eval_chars:
                return [name for name in names if name not in held_out], held_out
            held_out.append(name)
            chars += len(topics[name])
        if first == HELD_OUT_EVERY // 2:
            break
    raise ValueError(f"the help topics hold too little text to keep {eval_chars} characters for evaluation")


def text_records(topics: dict[str, str], names: list[str]) -> list[dict[str, str]]:
    """One record for each topic: {"text", "topic"}."""
    return [{"text": topics[name], "topic": name} for name in names]


def alpaca_records(topics: dict[str, str], names: list[str]) -> list[dict[str, str]]:
    """One question and answer for each paragraph of prose (60 to 600 characters, ending as a sentence does)."""
    records = []
    for name in names:
        title = topics[name].splitlines()[0].strip()
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            answer = " ".join(paragraph.split())
            if 60 <= len(answer) <= 600 and answer[0].isupper() and answer.endswith("."):
                question = f'What does the Python manual say under "{title}" about {" ".join(answer.split()[:4])} ...?'
                records.append({"instruction": question, "input": "", "output": answer})
    return records


def write_jsonl(path: Path, records: list[dict[str, str]]) -> None:
    """Write one JSON object a line; the file appears under its name when it is complete."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    partial.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and eval.jsonl")
    parser.add_argument("--format", choices=["text", "alpaca"], default="text", help="kind of records")
    parser.add_argument("--eval-sequences", type=int, default=8, help="sequences that the held-out part must fill")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens of one sequence")
    options = parser.parse_args(argv)
    if options.eval_sequences < 1 or options.sequence_length < 1:
        parser.error("--eval-sequences and --sequence-length must be 1 or more")
    topics = read_topics()
    try:
        train, held_out = split_topics(topics, options.eval_sequences * options.sequence_length * CHARS_PER_TOKEN)
    except ValueError as error:
        parser.error(str(error))
    to_records = alpaca_records if options.format == "alpaca" else text_records
    options.out.mkdir(parents=True, exist_ok=True)
    for file_name, names in (("train.jsonl", train), ("eval.jsonl", held_out)):
        records = to_records(topics, names)
        write_jsonl(options.out / file_name, records)
        print(f"wrote {options.out / file_name}: {len(records)} records from {len(names)} topics")
    return 0


if __name__ == "__main__":
    sys.exit(main())
