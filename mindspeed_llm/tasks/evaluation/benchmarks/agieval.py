"""AGIEval: exams of schools, colleges and bars in English and Chinese (ruixiangcui/AGIEval), without examples.

Most subjects choose among options; `math` and `gaokao-mathcloze` write an expression.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Choose, Fields, Reading, Subject, Write
from mindspeed_llm.tasks.evaluation.documents import documents_of
from mindspeed_llm.tasks.evaluation.files import files_by_subject
from mindspeed_llm.tasks.evaluation.letters import announced_letters
from mindspeed_llm.tasks.evaluation.math_answers import (
    final_expression,
    final_expression_of_lm_eval,
    same_expression,
    same_expression_of_lm_eval,
)
from mindspeed_llm.tasks.evaluation.rows import Row, read_jsonl

_LETTERS = "ABCDEFG"
_ENGLISH = frozenset(
    {
        "aqua-rat",
        "gaokao-english",
        "logiqa-en",
        "lsat-ar",
        "lsat-lr",
        "lsat-rc",
        "sat-en",
        "sat-en-without-passage",
        "sat-math",
    }
)
_CHINESE = frozenset(
    {
        "gaokao-biology",
        "gaokao-chemistry",
        "gaokao-chinese",
        "gaokao-geography",
        "gaokao-history",
        "gaokao-mathqa",
        "gaokao-physics",
        "jec-qa-ca",
        "jec-qa-kd",
        "logiqa-zh",
    }
)
_ENGLISH_WRITTEN, _CHINESE_WRITTEN = "math", "gaokao-mathcloze"
SUBJECTS = (*sorted(_ENGLISH | _CHINESE), _CHINESE_WRITTEN, _ENGLISH_WRITTEN)


def _passage(row: Row) -> str:
    return row.text("passage", may_be_empty=True) if row.fields.get("passage") is not None else ""


def _query(row: Row, subject: str, options: tuple[str, ...]) -> str:
    """The prompt of the benchmark's zero-shot setting."""
    asked = _passage(row) + ("Q: " if subject in _ENGLISH or subject == _ENGLISH_WRITTEN else "问题：")
    asked += row.text("question")
    if subject == _ENGLISH_WRITTEN:
        return f"{asked}\nA: The answer is"
    if subject == _CHINESE_WRITTEN:
        return f"{asked}\n答案："
    last = _LETTERS[len(options) - 1]
    if subject in _ENGLISH:
        return f"{asked} Answer Choices: {' '.join(options)}\nA: Among A through {last}, the answer is"
    return f"{asked} 选项：{' '.join(options)}\n答案：从A到{last}, 我们应选择"


def _gold_of(row: Row, num_options: int) -> tuple[int, ...]:
    """The right options; some subjects have several, as a list or written together."""
    label, letters = row.fields.get("label"), _LETTERS[:num_options]
    found = "".join(label) if isinstance(label, list) and all(isinstance(one, str) for one in label) else label
    if not isinstance(found, str) or not found or not set(found) <= set(letters):
        raise row.wrong("label", "letters out of " + ", ".join(letters))
    return tuple(letters.index(letter) for letter in found)


def _fields(row: Row, subject: str) -> Fields:
    if subject in (_ENGLISH_WRITTEN, _CHINESE_WRITTEN):
        return {"query": _query(row, subject, ()), "answer": row.text("answer")}
    options = row.texts("options", at_least=2)
    if len(options) > len(_LETTERS):
        raise row.wrong("options", f"at most {len(_LETTERS)} texts")
    return {"query": _query(row, subject, options), "choices": options, "gold": _gold_of(row, len(options))}


def load(path: Path) -> tuple[Subject, ...]:
    """The subjects `<subject>.jsonl` of a folder.

    Raises:
        UserError: a file is named after no subject, or a row is malformed.
    """
    subjects = []
    for name, file in files_by_subject(path, ".jsonl").items():
        if name not in SUBJECTS:
            raise UserError(
                f"{file} is named after none of agieval's subjects, expected one of {', '.join(SUBJECTS)}. "
                "Give the folder with the benchmark's own files."
            )
        documents = documents_of(read_jsonl(file), file, name, partial(_fields, subject=name))
        is_written = name in (_ENGLISH_WRITTEN, _CHINESE_WRITTEN)
        subjects.append(Subject(name=name, documents=documents, answer=_WRITE if is_written else None))
    return tuple(subjects)


def _prompt(fields: Fields) -> str:
    return str(fields["query"])


def _choices(fields: Fields) -> tuple[str, ...]:
    return tuple(fields["choices"])  # type: ignore[arg-type]


def _gold(fields: Fields) -> tuple[int, ...]:
    return tuple(fields["gold"])  # type: ignore[arg-type]


def _target(fields: Fields) -> str:
    return str(fields["answer"]) if "answer" in fields else _choices(fields)[_gold(fields)[0]]


_WRITE = Write(
    stop=("Q:",),
    max_new_tokens=32,
    readings=(
        # Named as the metric of the other subjects, so that the total takes in all of them.
        Reading(name="acc", extract=final_expression, matches=same_expression),
        Reading(name="lm-eval", extract=final_expression_of_lm_eval, matches=same_expression_of_lm_eval),
    ),
)

_PLAIN = Benchmark(
    name="agieval",
    version="2",
    load=load,
    prompt=_prompt,
    target=_target,
    answer=Choose(choices=_choices, gold=_gold),
    headline="acc",
    has_examples=False,
)


def _letters(fields: Fields) -> str:
    return "".join(sorted(_LETTERS[position] for position in _gold(fields))) if "gold" in fields else _target(fields)


def _load_written(path: Path) -> tuple[Subject, ...]:
    return tuple(
        replace(subject, answer=replace(_WRITE, max_new_tokens=_FREE_TOKENS)) if subject.answer is not None else subject
        for subject in load(path)
    )


_FREE_TOKENS = 512
# The same prompts, answered in words; of a question with several right options all have to be named, and no other.
_ALTERNATIVE = replace(
    _PLAIN,
    load=_load_written,
    target=_letters,
    answer=Write(
        stop=_WRITE.stop,
        max_new_tokens=_FREE_TOKENS,
        readings=(
            Reading(
                name="acc",
                extract=announced_letters(_LETTERS, several=True),
                matches=lambda answer, target: answer == target,
            ),
        ),
    ),
)
BENCHMARK = replace(_PLAIN, variants={"alternative-prompt": _ALTERNATIVE})
