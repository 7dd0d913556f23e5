"""What a benchmark is: documents with fields, a prompt made of them, and a way to answer and to judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.filters import Filter
from mindspeed_llm.tasks.evaluation.requests import Generate, LogLikelihood

Fields = Mapping[str, object]
Variant = Literal["alternative-prompt", "chain-of-thought"]
"""Another way to ask the questions of a benchmark, named as the flag that chooses it."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One question: the checked fields of a row, and where it came from."""

    subject: str
    index: int
    """Its position among the subject's documents, from 0."""
    place: str
    fields: Fields


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The documents of one subject and the examples that may stand in their prompts."""

    name: str
    documents: tuple[Document, ...]
    shots: tuple[Document, ...] = ()
    shots_are_documents: bool = False
    """Whether the examples are scored as well: then none stands in its own prompt."""
    answer: Choose | Write | None = None
    """How this subject is answered where that differs from the others of its benchmark."""
    description: str = ""
    """What every prompt of the subject begins with, its line ends included."""


@dataclass(frozen=True, kw_only=True)
class Choose:
    """Answer by the most likely of given continuations.

    Metrics: `acc` takes the sums of log-probabilities as they are, `acc_norm` divides each by the number of characters
    of its choice. The first of equals wins, as numpy.argmax has it.
    """

    choices: Callable[[Fields], tuple[str, ...]]
    gold: Callable[[Fields], tuple[int, ...]]
    """The right choices by their position from 0; any of them counts."""
    metrics: tuple[str, ...] = ("acc", "acc_norm")
    """Those that are reported; every one takes a choice by the same log-likelihoods."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read the answer out of a text, and when the answer counts as right."""

    name: str
    extract: Filter
    matches: Callable[[str, str], bool]
    """(what was extracted, the target) -> right or wrong"""
    judge: Callable[[str, Fields], bool] | None = None
    """(what was extracted, the document's fields) -> right or wrong, in place of `matches` where the target alone does
    not say it."""


@dataclass(frozen=True, kw_only=True)
class Write:
    """Answer by writing text, read in one or more ways; all of them are reported side by side."""

    stop: tuple[str, ...]
    max_new_tokens: int
    readings: tuple[Reading, ...]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the readings."""
        return tuple(reading.name for reading in self.readings)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The declaration of a benchmark."""

    name: str
    version: str
    """Changes when a prompt, a reading or a target changes: scores of different versions do not compare."""
    load: Callable[[Path], tuple[Subject, ...]]
    """From the path that the user gives; raises UserError naming file, line and field."""
    prompt: Callable[[Fields], str]
    """The question as the prompt shows it, up to where the answer begins."""
    target: Callable[[Fields], str]
    """The right answer as text: what an example shows and what a written answer is compared with."""
    answer: Choose | Write
    headline: str
    """The metric that stands for the benchmark where only one number does; every subject has it."""
    num_fewshot: int = 0
    has_examples: bool = True
    """Whether its files bring examples for prompts."""
    shown: Callable[[Fields], str] | None = None
    """The answer as an example shows it; None: as the target."""
    delimiter: str = " "
    """What parts a question from its answer."""
    original_metric: str | None = None
    """The reading of the benchmark's own scorer, where the headline is another one (--origin-postprocess)."""
    variants: Mapping[Variant, Benchmark] = field(default_factory=dict)
    language: str | None = None
    """That of its prompts, "en" or "zh"; None: each subject has its own."""
    in_language: Mapping[str, Benchmark] = field(default_factory=dict)
    """The same questions with prompts in other languages."""
    with_instruction: Callable[[str], Benchmark] | None = None
    """The benchmark with a text of the user's before each question (--instruction-template)."""
    fit: Callable[[tuple[Subject, ...], Callable[[str], Sequence[int]], int, int], tuple[Subject, ...]] | None = None
    """Makes documents that depend on the model, from (what `load` gave, text -> token ids, the model's positions, the
    most tokens that an answer has, 0 where none is written)."""
    continues_text: bool = False
    """Whether an answer goes on with the prompt's own text, which the reply of a conversation does not: it is asked in
    its alternative form there."""
    executes_code: bool = False
    """Whether judging runs programs that the model has written: the user has to allow it."""

    def __post_init__(self) -> None:
        assert self.headline in self.answer.metrics, (self.name, self.headline)
        assert self.original_metric is None or self.original_metric in self.answer.metrics, self.name

    def answer_of(self, subject: Subject) -> Choose | Write:
        """How a subject's questions are answered."""
        return subject.answer or self.answer


def context(benchmark: Benchmark, subject: Subject, document: Document, num_fewshot: int | None = None) -> str:
    """The whole prompt: description, examples with their answers, question.

    Examples are the first of the subject's, so that all prompts of a subject share their beginning. Joined as lm-eval
    does: the delimiter before an answer, an empty line after it.

    Raises:
        UserError: the subject has fewer examples than are asked for.
    """
    wanted = benchmark.num_fewshot if num_fewshot is None else num_fewshot
    shots = [shot for shot in subject.shots if not (subject.shots_are_documents and shot.fields == document.fields)][
        :wanted
    ]
    if len(shots) < wanted:
        raise UserError(
            f"{benchmark.name}, {subject.name}: {wanted} examples are asked for a prompt, "
            f"{_held(subject, len(shots))}. Complete the file with the examples, or ask for fewer with --num-fewshot."
        )
    shown = benchmark.shown or benchmark.target
    examples = [f"{benchmark.prompt(shot.fields)}{benchmark.delimiter}{shown(shot.fields)}\n\n" for shot in shots]
    return "".join([subject.description, *examples, benchmark.prompt(document.fields)])


def request(
    benchmark: Benchmark, subject: Subject, document: Document, num_fewshot: int | None = None
) -> LogLikelihood | Generate:
    """What to ask a model about a document. Raises UserError as `context` does."""
    text = context(benchmark, subject, document, num_fewshot)
    answer = benchmark.answer_of(subject)
    if isinstance(answer, Choose):
        choices = answer.choices(document.fields)
        return LogLikelihood(context=text, continuations=tuple(f"{benchmark.delimiter}{choice}" for choice in choices))
    return Generate(prompt=text, stop=answer.stop, max_new_tokens=answer.max_new_tokens)


def _held(subject: Subject, usable: int) -> str:
    if not subject.shots_are_documents:
        return f"its files hold {usable}"
    rows = len(subject.documents)
    return (
        f"{usable} can stand in one: its file has {rows} row{'s' * (rows != 1)}, and the question itself is no example"
    )
