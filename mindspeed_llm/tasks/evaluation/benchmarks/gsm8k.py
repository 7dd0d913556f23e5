"""GSM8K: word problems of grade school, answered by working them out (openai/grade-school-math)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Document, Fields, Reading, Subject, Write
from mindspeed_llm.tasks.evaluation.documents import documents_of
from mindspeed_llm.tasks.evaluation.files import one_file
from mindspeed_llm.tasks.evaluation.filters import INVALID, exact_match, regex
from mindspeed_llm.tasks.evaluation.numbers import final_number, same_number
from mindspeed_llm.tasks.evaluation.rows import Row, read_jsonl

NAME = "gsm8k"
_TRAIN = ("train.jsonl", "*train*.jsonl")
_CALCULATION = re.compile(r"<<.*?>>")  # what a calculator did, written into the worked answers


def _fields(row: Row) -> Fields:
    fields = {"question": row.text("question"), "answer": row.text("answer")}
    if "####" not in fields["answer"] or final_number(fields["answer"]) == INVALID:
        raise row.wrong("answer", 'a worked answer that ends in "#### <number>"')
    return fields


def _documents(file: Path) -> tuple[Document, ...]:
    return documents_of(read_jsonl(file), file, NAME, _fields)


def _train_file(folder: Path) -> Path | None:
    places = (folder, folder.parent, folder.parent / "train")
    # The distribution has a train_socratic.jsonl as well, which answers otherwise.
    return next((file for place in places for name in _TRAIN for file in sorted(place.glob(name))), None)


def load(path: Path) -> tuple[Subject, ...]:
    """The questions of `test.jsonl`, and examples from `train.jsonl`.

    The examples are looked for in the folder of the questions, above it, and in a folder `train` beside it.

    Raises:
        UserError: there is no such file, or a row of it is malformed.
    """
    test = one_file(path, ("test.jsonl", "*test*.jsonl"))
    train = _train_file(test.absolute().parent)
    return (Subject(name=NAME, documents=_documents(test), shots=_documents(train) if train else ()),)


def _prompt(fields: Fields) -> str:
    return f"Question: {fields['question']}\nAnswer:"


def _target(fields: Fields) -> str:
    return str(fields["answer"])


_same_text = exact_match(remove=(",", r"\$", r"(?s).*#### ", r"\.$"), ignore_case=True)

_FLEXIBLE = Reading(name="flexible-extract", extract=regex(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", take=-1), matches=_same_text)
# Ours: by value, where the other two compare digits.
_NUMBER = Reading(name="number", extract=final_number, matches=same_number)
_STOP = ("Question:", "</s>", "<|im_end|>")


def _step_by_step(fields: Fields) -> str:
    return f"Question: {fields['question']}\nLet's think step by step.\nAnswer:"


def _in_sentences(fields: Fields) -> str:
    """The worked answer as running text that ends in "The answer is <number>."."""
    steps, number = _CALCULATION.sub("", str(fields["answer"])).rsplit("####", maxsplit=1)
    return f"{' '.join(steps.split())} The answer is {number.strip()}."


_PLAIN = Benchmark(
    name=NAME,
    version="1",
    load=load,
    prompt=_prompt,
    target=_target,
    answer=Write(
        stop=_STOP,
        max_new_tokens=256,
        readings=(
            Reading(name="strict-match", extract=regex(r"#### (\-?[0-9\.\,]+)"), matches=_same_text),
            _FLEXIBLE,
            _NUMBER,
        ),
    ),
    headline="flexible-extract",
    original_metric="strict-match",
    num_fewshot=5,
    language="en",
)
_CHAIN_OF_THOUGHT = replace(
    _PLAIN,
    prompt=_step_by_step,
    shown=_in_sentences,
    answer=Write(
        stop=_STOP,
        max_new_tokens=512,
        readings=(
            # The pattern of lm-eval's gsm8k_cot.
            Reading(name="strict-match", extract=regex(r"The answer is (\-?[0-9\.\,]+)."), matches=_same_text),
            _FLEXIBLE,
            _NUMBER,
        ),
    ),
    num_fewshot=4,
)
BENCHMARK = replace(_PLAIN, variants={"chain-of-thought": _CHAIN_OF_THOUGHT})
