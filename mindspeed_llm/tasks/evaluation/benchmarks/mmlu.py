"""MMLU: questions of 57 subjects with four options (hendrycks/test).

`mmlu` lets the model write the letter, as the flag --max-new-tokens of its users expects; `mmlu_ppl` takes the most
likely of the four letters. Both see the same prompt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mindspeed_llm.tasks.evaluation.benchmark import Document, Reading, Subject, Write
from mindspeed_llm.tasks.evaluation.filters import FIRST_LINE, exact_match
from mindspeed_llm.tasks.evaluation.four_choices import LETTERS, documents, letter_benchmark, load_with_dev
from mindspeed_llm.tasks.evaluation.rows import read_csv

_COLUMNS = ("question", *LETTERS, "answer")  # the files have no header


def _read(file: Path, subject: str) -> tuple[Document, ...]:
    return documents(read_csv(file, _COLUMNS), file, subject, question="question", answer="answer")


def _description(subject: str) -> str:
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"


def load(path: Path) -> tuple[Subject, ...]:
    """The subjects `<subject>_test.csv` of a folder, with examples from `../dev/<subject>_dev.csv`."""
    return load_with_dev(path, _read, suffix="_test.csv", dev_suffix="_dev.csv", describe=_description)


MMLU_PPL = letter_benchmark("mmlu_ppl", load, "Answer:")
MMLU = replace(
    MMLU_PPL,
    name="mmlu",
    answer=Write(
        stop=("</s>", "\n"),
        max_new_tokens=256,
        readings=(
            Reading(
                name="get_response",
                extract=FIRST_LINE,
                matches=exact_match(ignore_case=True, ignore_punctuation=True),
            ),
        ),
    ),
    headline="get_response",
)
