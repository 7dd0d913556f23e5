"""HellaSwag: which ending follows a beginning (rowanz/hellaswag)."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Choose, Fields, Subject
from mindspeed_llm.tasks.evaluation.documents import documents_of
from mindspeed_llm.tasks.evaluation.files import one_file
from mindspeed_llm.tasks.evaluation.rows import Row, read_jsonl

NAME = "hellaswag"
_NUM_ENDINGS = 4


def _clean(text: str) -> str:
    """Without the marks that the articles' pages left in the text, as lm-eval takes them out."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def load(path: Path) -> tuple[Subject, ...]:
    """The beginnings of `hellaswag_val.jsonl`.

    Raises:
        UserError: there is no such file, or a row of it is malformed.
    """
    file = one_file(path, ("*val*.jsonl", "*.jsonl"))
    return (Subject(name=NAME, documents=documents_of(read_jsonl(file), file, NAME, _fields)),)


def _fields(row: Row) -> Fields:
    beginning = f"{row.text('ctx_a')} {row.text('ctx_b', may_be_empty=True).capitalize()}"
    endings, label = row.texts("endings", at_least=_NUM_ENDINGS), row.fields.get("label")
    # Some copies of the data have the number as a text.
    if str(label) not in map(str, range(len(endings))) or isinstance(label, bool):
        raise row.wrong("label", f"a number from 0 to {len(endings) - 1}")
    return {
        "query": _clean(f"{row.text('activity_label')}: {beginning}"),
        "choices": tuple(_clean(ending) for ending in endings),
        "label": int(str(label)),
    }


def _prompt(fields: Fields) -> str:
    return str(fields["query"])


def _choices(fields: Fields) -> tuple[str, ...]:
    return tuple(fields["choices"])  # type: ignore[arg-type]


def _gold(fields: Fields) -> tuple[int, ...]:
    return (int(str(fields["label"])),)


def _target(fields: Fields) -> str:
    return _choices(fields)[_gold(fields)[0]]


BENCHMARK = Benchmark(
    name=NAME,
    version="1",
    load=load,
    prompt=_prompt,
    target=_target,
    answer=Choose(choices=_choices, gold=_gold),
    # Endings differ in length: the figure that is commonly given takes that out.
    headline="acc_norm",
    original_metric="acc",
    has_examples=False,
    language="en",
)
