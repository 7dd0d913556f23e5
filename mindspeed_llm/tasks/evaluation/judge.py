"""From a model's answers to verdicts and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Choose, Document, Subject, request
from mindspeed_llm.tasks.evaluation.requests import Generate, LogLikelihood, Model
from mindspeed_llm.tasks.evaluation.scores import Score, score, total_score


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """What was asked, answered and found about one document."""

    subject: str
    index: int
    prompt: str
    raw: str | tuple[float, ...]
    """The written text, or the log-likelihood of each choice."""
    extracted: dict[str, str]
    """By metric: the answer that was read, or the choice that won."""
    gold: str
    correct: dict[str, bool]
    """By metric."""
    is_tie: bool = False
    """All choices were equally likely: the model says nothing, the first choice won."""


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """The scores of a benchmark by metric, per subject and in all."""

    name: str
    version: str
    headline: str
    subjects: dict[str, dict[str, Score]]
    total: dict[str, Score]
    samples: tuple[SampleResult, ...]
    warnings: tuple[str, ...]


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _judge_choice(benchmark: Benchmark, answer: Choose, document: Document, prompt: str, raw: Sequence[float]):
    choices, gold = answer.choices(document.fields), answer.gold(document.fields)
    values = tuple(float(value) for value in raw)
    if len(values) != len(choices) or any(math.isnan(value) for value in values):
        raise ValueError(
            f"{benchmark.name}, {document.place}: the model gave {values} for {len(choices)} choices, "
            "expected one log-likelihood for each"
        )
    ranked = {
        "acc": values,
        "acc_norm": tuple(value / max(len(choice), 1) for value, choice in zip(values, choices, strict=True)),
    }
    best = {metric: _best(ranked[metric]) for metric in answer.metrics}
    return SampleResult(
        subject=document.subject,
        index=document.index,
        prompt=prompt,
        raw=values,
        extracted={metric: choices[position] for metric, position in best.items()},
        gold=" | ".join(choices[position] for position in gold),
        correct={metric: position in gold for metric, position in best.items()},
        is_tie=len(set(values)) == 1,
    )


def judge(
    benchmark: Benchmark,
    subject: Subject,
    document: Document,
    asked: LogLikelihood | Generate,
    raw: str | Sequence[float],
) -> SampleResult:
    """The verdict on one answer.

    Raises:
        ValueError: the model's answer is not of the kind asked for, or a log-likelihood is not a number.
    """
    answer = benchmark.answer_of(subject)
    if isinstance(answer, Choose):
        assert isinstance(asked, LogLikelihood)
        return _judge_choice(benchmark, answer, document, asked.context, raw)
    assert isinstance(asked, Generate)
    if not isinstance(raw, str):
        raise ValueError(f"{benchmark.name}, {document.place}: the model gave a {type(raw).__name__}, expected text")
    target = benchmark.target(document.fields)
    extracted = {reading.name: reading.extract(raw) for reading in answer.readings}
    return SampleResult(
        subject=document.subject,
        index=document.index,
        prompt=asked.prompt,
        raw=raw,
        extracted=extracted,
        gold=target,
        correct={reading.name: reading.matches(extracted[reading.name], target) for reading in answer.readings},
    )


def _warnings(benchmark: Benchmark, samples: Sequence[SampleResult]) -> tuple[str, ...]:
    ties = sum(sample.is_tie for sample in samples)
    if not ties:
        return ()
    return (
        f"{benchmark.name}: in {ties} of {len(samples)} samples all choices were equally likely, the first was taken. "
        "That part of the score says nothing about the model; look at its log-likelihoods.",
    )


def summarise(benchmark: Benchmark, samples: Sequence[SampleResult]) -> BenchmarkResult:
    """Scores of judged samples, in whatever order they come. Needs at least one sample."""
    ordered = tuple(sorted(samples, key=lambda sample: (sample.subject, sample.index)))
    by_subject: dict[str, list[SampleResult]] = {}
    for sample in ordered:
        by_subject.setdefault(sample.subject, []).append(sample)
    subjects = {
        subject: {metric: score([sample.correct[metric] for sample in part]) for metric in part[0].correct}
        for subject, part in by_subject.items()
    }
    # Subjects that are answered otherwise than the rest may lack a metric.
    metrics = dict.fromkeys(metric for part in subjects.values() for metric in part)
    return BenchmarkResult(
        name=benchmark.name,
        version=benchmark.version,
        headline=benchmark.headline,
        subjects=subjects,
        total={
            metric: total_score([part[metric] for part in subjects.values() if metric in part]) for metric in metrics
        },
        samples=ordered,
        warnings=_warnings(benchmark, ordered),
    )


def evaluate(
    benchmark: Benchmark,
    subjects: Sequence[Subject],
    model: Model,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> BenchmarkResult:
    """Ask a model everything and score it, in one process.

    Args:
        benchmark: the declaration.
        subjects: what its `load` gave.
        model: answers the requests.
        limit: the most documents of each subject, from the first; None: all.
        num_fewshot: examples in a prompt; None: as declared.

    Raises:
        UserError: a subject has fewer examples than a prompt needs.
        ValueError: the model's answers are not of the kind asked for.
    """
    documents = [(subject, document) for subject in subjects for document in subject.documents[:limit]]
    asked = [request(benchmark, subject, document, num_fewshot) for subject, document in documents]
    likelihoods = iter(model.loglikelihood([question for question in asked if isinstance(question, LogLikelihood)]))
    texts = iter(model.generate([question for question in asked if isinstance(question, Generate)]))
    samples = [
        judge(
            benchmark, subject, document, question, next(likelihoods if isinstance(question, LogLikelihood) else texts)
        )
        for (subject, document), question in zip(documents, asked, strict=True)
    ]
    return summarise(benchmark, samples)
