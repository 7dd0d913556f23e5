"""From a model's answers to verdicts and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Choose, Document, Subject, Write
from mindspeed_llm.tasks.evaluation.requests import Answer
from mindspeed_llm.tasks.evaluation.scores import Score, score, total_score


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """What was asked, answered and found about one document."""

    subject: str
    index: int
    prompt: str
    raw: str | tuple[float, ...]
    """The written text, or the log-likelihood of each choice."""
    choices: tuple[str, ...] = ()
    extracted: dict[str, str]
    """By metric: the answer that was read, or the choice that won."""
    gold: str
    correct: dict[str, bool]
    """By metric."""
    is_tie: bool = False
    """All choices were equally likely: the model says nothing, the first choice won."""
    cut_tokens: int = 0
    """So many tokens of the prompt's beginning did not fit into the model."""
    thought_has_no_end: bool = False
    """The model was still thinking when its text ended: what was read is empty."""


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


def _judge_choice(
    benchmark: Benchmark, choose: Choose, document: Document, prompt: str, answer: Answer
) -> SampleResult:
    choices, gold = choose.choices(document.fields), choose.gold(document.fields)
    values = answer.raw
    if isinstance(values, str) or len(values) != len(choices) or any(math.isnan(value) for value in values):
        raise ValueError(
            f"{benchmark.name}, {document.place}: the model gave {values!r} for {len(choices)} choices, "
            "expected one log-likelihood for each"
        )
    ranked = {
        "acc": values,
        "acc_norm": tuple(value / max(len(choice), 1) for value, choice in zip(values, choices, strict=True)),
    }
    best = {metric: _best(ranked[metric]) for metric in choose.metrics}
    return SampleResult(
        subject=document.subject,
        index=document.index,
        prompt=prompt,
        raw=values,
        choices=choices,
        extracted={metric: choices[position] for metric, position in best.items()},
        gold=" | ".join(choices[position] for position in gold),
        correct={metric: position in gold for metric, position in best.items()},
        is_tie=len(set(values)) == 1,
        cut_tokens=answer.cut_tokens,
    )


def _judge_text(benchmark: Benchmark, write: Write, document: Document, prompt: str, answer: Answer) -> SampleResult:
    text = answer.raw
    if not isinstance(text, str):
        raise ValueError(f"{benchmark.name}, {document.place}: the model gave {text!r}, expected text")
    target = benchmark.target(document.fields)
    extracted = {reading.name: reading.extract(text[answer.begins_at :]) for reading in write.readings}
    return SampleResult(
        subject=document.subject,
        index=document.index,
        prompt=prompt,
        raw=text,
        extracted=extracted,
        gold=target,
        correct={
            reading.name: reading.judge(extracted[reading.name], document.fields)
            if reading.judge is not None
            else reading.matches(extracted[reading.name], target)
            for reading in write.readings
        },
        cut_tokens=answer.cut_tokens,
        thought_has_no_end=answer.thought_has_no_end,
    )


def judge(benchmark: Benchmark, subject: Subject, document: Document, prompt: str, answer: Answer) -> SampleResult:
    """The verdict on one answer.

    Args:
        prompt: what the model was shown, for people.

    Raises:
        ValueError: the model's answer is not of the kind asked for, or a log-likelihood is not a number.
    """
    way = benchmark.answer_of(subject)
    if isinstance(way, Choose):
        return _judge_choice(benchmark, way, document, prompt, answer)
    return _judge_text(benchmark, way, document, prompt, answer)


def _warnings(benchmark: Benchmark, samples: Sequence[SampleResult]) -> tuple[str, ...]:
    ties = sum(sample.is_tie for sample in samples)
    cut = sum(sample.cut_tokens > 0 for sample in samples)
    endless = sum(sample.thought_has_no_end for sample in samples)
    found = []
    if ties:
        found.append(
            f"{benchmark.name}: in {ties} of {len(samples)} samples all choices were equally likely, the first was "
            "taken. That part of the score says nothing about the model; look at its log-likelihoods."
        )
    if cut:
        found.append(
            f"{benchmark.name}: {cut} of {len(samples)} prompts were longer than the model's context; their beginnings "
            f"were cut. {_advice_for_cut_prompts(benchmark)}"
        )
    if endless:
        found.append(
            f"{benchmark.name}: {endless} of {len(samples)} answers ended while the model was still thinking; they are "
            "read as empty. Give it more room with --max-new-tokens, or let it answer at once with --enable-thinking "
            "false."
        )
    return tuple(found)


def _advice_for_cut_prompts(benchmark: Benchmark) -> str:
    if benchmark.has_examples:
        return "Fewer examples (--num-fewshot) make them shorter."
    if isinstance(benchmark.answer, Write):
        return "Shorter answers (--max-new-tokens) leave more room for them."
    return "Those questions are too long for this model."


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
