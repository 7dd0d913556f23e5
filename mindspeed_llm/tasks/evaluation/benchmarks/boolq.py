"""BoolQ: questions about a passage that are answered yes or no (google-research-datasets/boolean-questions)."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Choose, Fields, Subject
from mindspeed_llm.tasks.evaluation.documents import documents_of
from mindspeed_llm.tasks.evaluation.files import one_file
from mindspeed_llm.tasks.evaluation.rows import Row, read_jsonl

NAME = "boolq"
_CHOICES = ("no", "yes")


def load(path: Path) -> tuple[Subject, ...]:
    """The questions of `dev.jsonl`, the set of the distribution that has answers and is not for training.

    Raises:
        UserError: there is no such file, or a row of it is malformed.
    """
    file = one_file(path, ("dev.jsonl", "*dev*.jsonl"))
    return (Subject(name=NAME, documents=documents_of(read_jsonl(file), file, NAME, _fields)),)


def _fields(row: Row) -> Fields:
    return {"passage": row.text("passage"), "question": row.text("question"), "answer": row.boolean("answer")}


def _prompt(fields: Fields) -> str:
    return f"{fields['passage']}\nQuestion: {fields['question']}?\nAnswer:"


def _gold(fields: Fields) -> tuple[int, ...]:
    return (int(bool(fields["answer"])),)


def _target(fields: Fields) -> str:
    return _CHOICES[_gold(fields)[0]]


BENCHMARK = Benchmark(
    name=NAME,
    version="1",
    load=load,
    prompt=_prompt,
    target=_target,
    answer=Choose(choices=lambda fields: _CHOICES, gold=_gold, metrics=("acc",)),
    headline="acc",
)
