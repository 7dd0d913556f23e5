"""MMLU: questions of 57 subjects with four options (hendrycks/test).

`mmlu` lets the model write the letter, as the flag --max-new-tokens of its users expects; `mmlu_ppl` takes the most
likely of the four letters. Both see the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mindspeed_llm.tasks.evaluation.benchmark import Document, Subject
from mindspeed_llm.tasks.evaluation.four_choices import (
    LETTERS,
    WRITE_LETTER,
    documents,
    letter_benchmarks,
    load_with_dev,
)
from mindspeed_llm.tasks.evaluation.rows import read_csv

_COLUMNS = ("question", *LETTERS, "answer")  # the files have no header


def _read(file: Path, subject: str) -> tuple[Document, ...]:
    return documents(read_csv(file, _COLUMNS), file, subject, question="question", answer="answer")


def _title(subject: str) -> str:
    return subject.replace("_", " ")


def _description(subject: str) -> str:
    return f"The following are multiple choice questions (with answers) about {_title(subject)}.\n\n"


def load(path: Path, describe: Callable[[str], str] = _description) -> tuple[Subject, ...]:
    """The subjects `<subject>_test.csv` of a folder, with examples from `../dev/<subject>_dev.csv`."""
    return load_with_dev(path, _read, suffix="_test.csv", dev_suffix="_dev.csv", describe=describe)


MMLU = letter_benchmarks("mmlu", load, describe=_description, titles=_title, language="en", answer=WRITE_LETTER)
MMLU_PPL = letter_benchmarks(
    "mmlu_ppl", load, describe=_description, titles=_title, language="en", has_alternative=False
)
