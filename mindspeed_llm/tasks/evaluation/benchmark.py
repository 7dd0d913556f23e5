"""What a benchmark is: documents with fields, a prompt made of them, and a way to answer and to judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.filters import Filter
from mindspeed_llm.tasks.evaluation.requests import Generate, LogLikelihood

Fields = Mapping[str, object]


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
    """The metric that stands for the benchmark where only one number does."""
    num_fewshot: int = 0

    def __post_init__(self) -> None:
        assert self.headline in self.answer.metrics, (self.name, self.headline)

    def answer_of(self, subject: Subject) -> Choose | Write:
        """How a subject's questions are answered."""
        return subject.answer or self.answer


def context(benchmark: Benchmark, subject: Subject, document: Document, num_fewshot: int | None = None) -> str:
    """The whole prompt: description, examples with their answers, question.

    Examples are the first of the subject's, so that all prompts of a subject share their beginning. Joined as lm-eval
    does: a blank before an answer, an empty line after it.

    Raises:
        UserError: the subject has fewer examples than are asked for.
    """
    wanted = benchmark.num_fewshot if num_fewshot is None else num_fewshot
    shots = [shot for shot in subject.shots if not (subject.shots_are_documents and shot.fields == document.fields)][
        :wanted
    ]
    if len(shots) < wanted:
        raise UserError(
            f"{benchmark.name}, {subject.name}: {wanted} examples are asked for a prompt, its files hold {len(shots)}. "
            "Complete the file with the examples."
        )
    examples = [f"{benchmark.prompt(shot.fields)} {benchmark.target(shot.fields)}\n\n" for shot in shots]
    return "".join([subject.description, *examples, benchmark.prompt(document.fields)])


def request(
    benchmark: Benchmark, subject: Subject, document: Document, num_fewshot: int | None = None
) -> LogLikelihood | Generate:
    """What to ask a model about a document. Raises UserError as `context` does."""
    text = context(benchmark, subject, document, num_fewshot)
    answer = benchmark.answer_of(subject)
    if isinstance(answer, Choose):
        choices = answer.choices(document.fields)
        return LogLikelihood(context=text, continuations=tuple(f" {choice}" for choice in choices))
    return Generate(prompt=text, stop=answer.stop, max_new_tokens=answer.max_new_tokens)
