"""Models that need no weights, and what every benchmark must make of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_llm.tasks.evaluation import judge, run
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Choose, Document, Fields, Subject, request
from mindspeed_llm.tasks.evaluation.judge import BenchmarkResult, SampleResult
from mindspeed_llm.tasks.evaluation.ranks import Ranks
from mindspeed_llm.tasks.evaluation.requests import Answer, Generate, LogLikelihood, Question
from mindspeed_llm.tasks.evaluation.tasks import Item, Task


class Toy:
    """What a model says of itself; each answers one question at a time."""

    replica, replicas, is_first_of_replica = 0, 1, True
    batch_size, max_length = 8, 4096
    description, fingerprint = "a toy", "toy"
    decisive: dict[str, Any] = {}

    def close(self) -> None: ...

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def shown(self, prompt: str) -> str:
        return prompt

    def answer(self, asked: Sequence[Question], on_answer: Callable[[int, Answer], None]) -> None:
        for place, question in enumerate(asked):
            raw = self.choose(question) if isinstance(question, LogLikelihood) else self.write(question)
            on_answer(place, Answer(raw=raw))

    def choose(self, question: LogLikelihood) -> tuple[float, ...]:
        raise NotImplementedError

    def write(self, question: Generate) -> str:
        raise NotImplementedError


@dataclass
class Oracle(Toy):
    """Knows the right answer of every question, and writes as tokenizers do: with the blank before the first word."""

    tasks: Sequence[Task]
    gold: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for task in self.tasks:
            for item in task.items:
                answer = task.benchmark.answer_of(item.subject)
                self.gold[item.question] = (
                    answer.gold(item.document.fields)
                    if isinstance(answer, Choose)
                    else _written(task.benchmark, item.document.fields)
                )

    def choose(self, question: LogLikelihood) -> tuple[float, ...]:
        right = self.gold[question]
        return tuple(-1.0 if position in right else -100.0 for position in range(len(question.continuations)))

    def write(self, question: Generate) -> str:
        return self.gold[question]


def _written(benchmark: Benchmark, fields: Fields) -> str:
    """The right answer as the examples in prompts show it."""
    target = benchmark.target(fields)
    if benchmark.executes_code:
        return target
    shown = benchmark.shown or benchmark.target
    # What examples of bbh have besides, and its questions have not.
    return " " + shown({"worked": f"Each not turns it.\nSo the answer is {target}.", **fields})


@dataclass
class Constant(Toy):
    """Finds every continuation as likely as any other, and writes the same text every time."""

    text: str = ""

    def choose(self, question: LogLikelihood) -> tuple[float, ...]:
        return (-1.0,) * len(question.continuations)

    def write(self, question: Generate) -> str:
        return self.text


def task_of(benchmark: Benchmark, subjects: Sequence[Subject], *, limit: int | None = None) -> Task:
    """A task of loaded subjects, with the examples that the benchmark declares."""
    items = tuple(
        Item(subject=subject, document=document, question=request(benchmark, subject, document))
        for subject in subjects
        for document in subject.documents[:limit]
    )
    return Task(
        benchmark=benchmark,
        subjects=tuple(subjects),
        num_fewshot=benchmark.num_fewshot,
        max_eval_samples=limit,
        settings={},
        items=items,
    )


def evaluate(benchmark: Benchmark, subjects: Sequence[Subject], model: Toy) -> BenchmarkResult:
    """The result of one task in this process."""
    (result,) = run.evaluate([task_of(benchmark, subjects)], model, Ranks())
    return result


def judged(benchmark: Benchmark, subject: Subject, document: Document, raw: str | Sequence[float]) -> SampleResult:
    """The verdict on one answer."""
    answer = Answer(raw=raw if isinstance(raw, str) else tuple(raw))
    return judge.judge(benchmark, subject, document, "", answer)


def assert_oracle_is_right(benchmark: Benchmark, subjects: Sequence[Subject], *, but: Sequence[str] = ()) -> None:
    """All metrics give 100 % to the model that answers the gold, those in `but` excepted."""
    result = evaluate(benchmark, subjects, Oracle([task_of(benchmark, subjects)]))
    for metric in benchmark.answer.metrics:
        if metric not in but:
            assert result.total[metric].accuracy == 1.0, metric
            assert result.total[metric].total == sum(len(subject.documents) for subject in subjects)
    assert not result.warnings


def constant_result(benchmark: Benchmark, subjects: Sequence[Subject], text: str = "") -> BenchmarkResult:
    """What a constant model gets; where it had to choose, the warning about ties is checked as well."""
    result = evaluate(benchmark, subjects, Constant(text))
    chosen = sum(len(subject.documents) for subject in subjects if isinstance(benchmark.answer_of(subject), Choose))
    assert [f"in {chosen} of {len(result.samples)} samples" in warning for warning in result.warnings] == [True] * (
        chosen > 0
    )
    return result
