"""What the benchmarks with questions, options A to D and a letter as the answer have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Choose, Document, Fields, Subject
from mindspeed_llm.tasks.evaluation.documents import documents_of
from mindspeed_llm.tasks.evaluation.files import dev_file, files_by_subject
from mindspeed_llm.tasks.evaluation.rows import Row

LETTERS = "ABCD"


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


def letter_benchmark(name: str, load: Callable[[Path], tuple[Subject, ...]], cue: str) -> Benchmark:
    """The benchmark whose prompts end in `cue` and whose answer is the most likely letter, after five examples."""
    return Benchmark(
        name=name,
        version="1",
        load=load,
        prompt=prompt_ending_in(cue),
        target=target,
        answer=CHOOSE_LETTER,
        headline="acc",
        num_fewshot=5,
    )


def title_of(subject: str, titles: Mapping[str, str], *, benchmark: str, suffix: str) -> str:
    """How a benchmark calls a subject in its prompts. Raises UserError where it has no such subject."""
    if subject not in titles:
        raise UserError(
            f"{benchmark}: {subject}{suffix} is named after none of the benchmark's {len(titles)} subjects, expected a "
            f"name such as {next(iter(titles))}{suffix}. Give the folder with the benchmark's own files."
        )
    return titles[subject]
