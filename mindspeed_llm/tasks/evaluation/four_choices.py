"""What the benchmarks with questions, options A to D and a letter as the answer have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Choose, Document, Fields, Reading, Subject, Write
from mindspeed_llm.tasks.evaluation.documents import documents_of
from mindspeed_llm.tasks.evaluation.files import dev_file, files_by_subject
from mindspeed_llm.tasks.evaluation.filters import FIRST_LINE, exact_match
from mindspeed_llm.tasks.evaluation.letters import announced_letters
from mindspeed_llm.tasks.evaluation.rows import Row

LETTERS = "ABCD"
_CUES = {"en": "Answer:", "zh": "答案："}
_INSTRUCTIONS = {
    "en": (
        "Answer the following multiple choice question about {title}. "
        'End your reply with "The answer is X.", X being the letter of the right option.\n\n'
    ),
    "zh": "请回答下面这道关于{title}的单项选择题，并以“答案是X”结束，X是正确选项的字母。\n\n",
}
_FIRST = {
    "en": "The following are multiple choice questions (with answers) about {title}.\n\n",
    "zh": "以下是关于{title}的单项选择题，请直接给出正确答案的选项。\n\n",
}
_SHOWN = {"en": "The answer is {letter}.", "zh": "答案是{letter}"}


def prompt_ending_in(cue: str) -> Callable[[Fields], str]:
    """The question, a line for each option, and the cue on the last line."""

    def prompt(fields: Fields) -> str:
        options = "".join(f"{letter}. {fields[letter]}\n" for letter in LETTERS)
        return f"{str(fields['question']).strip()}\n{options}{cue}"

    return prompt


def target(fields: Fields) -> str:
    """The letter of the right option."""
    return str(fields["answer"])


CHOOSE_LETTER = Choose(
    choices=lambda fields: tuple(LETTERS),
    gold=lambda fields: (LETTERS.index(target(fields)),),
    metrics=("acc",),
)
"""The most likely letter. As all are one character long, `acc_norm` would always be `acc`."""


def documents(rows: Iterable[Row], file: Path, subject: str, *, question: str, answer: str) -> tuple[Document, ...]:
    """The checked documents of a file.

    Args:
        rows: its rows.
        file: its path, for the message.
        subject: whose questions they are.
        question, answer: the columns' names in this benchmark.

    Raises:
        UserError: a row lacks a field, its answer is none of the letters, or there are no rows.
    """

    def fields(row: Row) -> Fields:
        return {
            "question": row.text(question),
            **{letter: row.text(letter) for letter in LETTERS},
            "answer": row.letter(answer, LETTERS),
        }

    return documents_of(rows, file, subject, fields)


def load_with_dev(
    path: Path,
    read: Callable[[Path, str], tuple[Document, ...]],
    *,
    suffix: str,
    dev_suffix: str,
    describe: Callable[[str], str],
) -> tuple[Subject, ...]:
    """The subjects `<subject><suffix>` of a folder with their examples from `../dev/<subject><dev_suffix>`.

    Args:
        path: a folder, or the file of one subject.
        read: the documents of (file, subject).
        suffix, dev_suffix: how the names of the files go on after the subject.
        describe: what the prompts of a subject begin with.

    Raises:
        UserError: a file is missing, or a row of one is malformed.
    """
    return tuple(
        Subject(
            name=subject,
            documents=read(file, subject),
            shots=read(dev_file(file, f"{subject}{dev_suffix}"), subject),
            description=describe(subject),
        )
        for subject, file in files_by_subject(path, suffix).items()
    )


LETTER = Reading(name="letter", extract=announced_letters(LETTERS), matches=lambda answer, target: answer == target)
"""The letter that a written answer gives in whatever words."""

WRITE_LETTER = Write(
    stop=("</s>", "\n"),
    max_new_tokens=256,
    readings=(
        LETTER,
        # lm-eval's: the first line has to be the letter and nothing else.
        Reading(
            name="get_response", extract=FIRST_LINE, matches=exact_match(ignore_case=True, ignore_punctuation=True)
        ),
    ),
)
_WRITE_FREELY = Write(stop=("</s>", "<|im_end|>"), max_new_tokens=512, readings=(LETTER,))


class Load(Protocol):
    """Reads the files at a path."""

    def __call__(self, path: Path, describe: Callable[[str], str]) -> tuple[Subject, ...]:
        """The subjects; `describe` says what the prompts of each begin with."""
        ...


def letter_benchmarks(
    name: str,
    load: Load,
    *,
    describe: Callable[[str], str],
    titles: Callable[[str], str],
    language: str,
    answer: Choose | Write = CHOOSE_LETTER,
    has_alternative: bool = True,
) -> Benchmark:
    """A benchmark of letters after five examples, with its other languages and its alternative prompt.

    The alternative is an instruction without examples, for models that follow instructions; it is answered in words.

    Args:
        load: reads the files.
        describe: the benchmark's own first lines for a subject, as lm-eval has them.
        titles: how a subject is called within prompts.
        language: of the benchmark's own prompts.
        answer: by the most likely letter, or by a written one.
        has_alternative: whether there is the instruction; it asks what `mmlu` asks of a benchmark that is about
            likelihoods.
    """

    def ask(tongue: str, first_lines: Callable[[str], str]) -> Benchmark:
        usual = Benchmark(
            name=name,
            version="1",
            load=partial(load, describe=first_lines),
            prompt=prompt_ending_in(_CUES[tongue]),
            target=target,
            answer=answer,
            headline=answer.metrics[0],
            original_metric="get_response" if answer is WRITE_LETTER else None,
            num_fewshot=5,
            language=tongue,
        )
        if not has_alternative:
            return usual
        instructed = replace(
            usual,
            load=partial(load, describe=lambda subject: _INSTRUCTIONS[tongue].format(title=titles(subject))),
            prompt=lambda fields: prompt_ending_in("")(fields).rstrip(),
            answer=_WRITE_FREELY,
            headline=LETTER.name,
            original_metric=None,
            num_fewshot=0,
            shown=lambda fields: _SHOWN[tongue].format(letter=target(fields)),
            delimiter="\n",
        )
        return replace(usual, variants={"alternative-prompt": instructed})

    other = "zh" if language == "en" else "en"
    return replace(
        ask(language, describe),
        in_language={other: ask(other, lambda subject: _FIRST[other].format(title=titles(subject)))},
    )


def title_of(subject: str, titles: Mapping[str, str], *, benchmark: str, suffix: str) -> str:
    """How a benchmark calls a subject in its prompts. Raises UserError where it has no such subject."""
    if subject not in titles:
        raise UserError(
            f"{benchmark}: {subject}{suffix} is named after none of the benchmark's {len(titles)} subjects, expected a "
            f"name such as {next(iter(titles))}{suffix}. Give the folder with the benchmark's own files."
        )
    return titles[subject]
