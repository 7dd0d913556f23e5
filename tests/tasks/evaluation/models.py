"""Models that need no weights, and what every benchmark must make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Choose, Subject, request
from mindspeed_llm.tasks.evaluation.judge import BenchmarkResult, evaluate
from mindspeed_llm.tasks.evaluation.requests import Generate, LogLikelihood


@dataclass
class Oracle:
    """Knows the right answer of every request, and writes as tokenizers do: with the blank before the first word."""

    benchmark: Benchmark
    subjects: Sequence[Subject]
    gold: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for subject in self.subjects:
            for document in subject.documents:
                asked = request(self.benchmark, subject, document)
                answer = self.benchmark.answer_of(subject)
                self.gold[asked] = (
                    answer.gold(document.fields)
                    if isinstance(answer, Choose)
                    else " " + self.benchmark.target(document.fields)
                )

    def loglikelihood(self, requests: Sequence[LogLikelihood]) -> list[list[float]]:
        return [
            [-1.0 if position in self.gold[asked] else -100.0 for position in range(len(asked.continuations))]
            for asked in requests
        ]

    def generate(self, requests: Sequence[Generate]) -> list[str]:
        return [self.gold[asked] for asked in requests]


@dataclass
class Constant:
    """Finds every continuation as likely as any other, and writes the same text every time."""

    text: str = ""

    def loglikelihood(self, requests: Sequence[LogLikelihood]) -> list[list[float]]:
        return [[-1.0] * len(asked.continuations) for asked in requests]

    def generate(self, requests: Sequence[Generate]) -> list[str]:
        return [self.text for _ in requests]


def assert_oracle_is_right(benchmark: Benchmark, subjects: Sequence[Subject], *, but: Sequence[str] = ()) -> None:
    """All metrics give 100 % to the model that answers the gold, those in `but` excepted."""
    result = evaluate(benchmark, subjects, Oracle(benchmark, subjects))
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
