"""BoolQ: questions about a passage that are answered yes or no (google-research-datasets/boolean-questions)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Choose, Fields, Reading, Subject, Write
from mindspeed_llm.tasks.evaluation.documents import documents_of
from mindspeed_llm.tasks.evaluation.files import one_file
from mindspeed_llm.tasks.evaluation.filters import INVALID
from mindspeed_llm.tasks.evaluation.letters import announced_letters
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


_read_given_letter = announced_letters("AB", lone=False)
_read_any_letter = announced_letters("AB")
_FIRST_WORD = re.compile(r"[\W_]*(yes|no)\b", re.IGNORECASE)
_WORD = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def _with_options(fields: Fields) -> str:
    return (
        f"{fields['passage']}\nQuestion: {fields['question']}?\nA. Yes\nB. No\n"
        'Reply with the letter of the right option, as "The answer is X.".'
    )


def _read_yes_or_no(text: str) -> str:
    """By the letter that the answer gives or begins with; else by the word that it begins with; else by a letter
    anywhere, which may also be part of a name ("hepatitis B"); else by the one of the two words that it has first.
    """
    letter = _read_given_letter(text)
    word = _FIRST_WORD.match(text)
    if letter == INVALID and word is None:
        letter = _read_any_letter(text)
        word = _WORD.search(text)
    if letter != INVALID:
        return "yes" if letter == "A" else "no"
    return word[1].lower() if word else INVALID


_PLAIN = Benchmark(
    name=NAME,
    version="1",
    load=load,
    prompt=_prompt,
    target=_target,
    answer=Choose(choices=lambda fields: _CHOICES, gold=_gold, metrics=("acc",)),
    headline="acc",
    has_examples=False,
    language="en",
)
_ALTERNATIVE = replace(
    _PLAIN,
    version="2",
    prompt=_with_options,
    answer=Write(
        stop=("</s>", "<|im_end|>"),
        max_new_tokens=256,
        readings=(Reading(name="letter", extract=_read_yes_or_no, matches=lambda answer, target: answer == target),),
    ),
    headline="letter",
)
BENCHMARK = replace(_PLAIN, variants={"alternative-prompt": _ALTERNATIVE})
