"""Benchmarks with their questions, ready to be asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Document, Fields, Subject, Write, request
from mindspeed_llm.tasks.evaluation.choosing import Chosen
from mindspeed_llm.tasks.evaluation.requests import Question


@dataclass(frozen=True, kw_only=True)
class Item:
    """One document with what is asked about it."""

    subject: Subject
    document: Document
    question: Question


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark whose data are loaded."""

    benchmark: Benchmark
    subjects: tuple[Subject, ...]
    num_fewshot: int
    max_eval_samples: int | None
    settings: dict[str, Any]
    """What the user has chosen about it, and the hash of its data: for results.json."""
    items: tuple[Item, ...] = ()
    """In the order of the data; empty as long as they depend on a model that is not there yet."""
    prompts_hash: str = field(default="")

    @property
    def name(self) -> str:
        """As --task has it."""
        return self.benchmark.name

    def described(self) -> dict[str, Any]:
        """What results.json says of it."""
        return {**self.settings, "prompts_hash": self.prompts_hash}

    def decisive(self) -> dict[str, Any]:
        """The part of it that decides the answers: not the place of the data."""
        return {name: value for name, value in self.described().items() if name != "data_path"}


def load_task(
    chosen: Chosen, *, max_eval_samples: int | None, max_new_tokens: int | None, instruction_template: str | None
) -> Task:
    """Read and check the data of a benchmark.

    Raises:
        UserError: files are missing or malformed, or hold fewer examples than a prompt has.
    """
    benchmark = chosen.benchmark
    subjects = benchmark.load(chosen.path)
    if max_new_tokens is not None:
        subjects = tuple(_with_limit(subject, max_new_tokens) for subject in subjects)
    task = Task(
        benchmark=benchmark,
        subjects=subjects,
        num_fewshot=chosen.num_fewshot,
        max_eval_samples=max_eval_samples,
        settings={
            "version": benchmark.version,
            "variant": chosen.variant,
            "language": benchmark.language,
            "num_fewshot": chosen.num_fewshot,
            "max_eval_samples": max_eval_samples,
            "max_new_tokens": max_new_tokens,
            "instruction_template": instruction_template,
            "data_path": str(chosen.path),
            "data_hash": _hash(_rows(subjects)),
        },
    )
    return task if benchmark.fit is not None else _with_items(task)


def fitted(task: Task, encode: Callable[[str], Sequence[int]], max_length: int) -> Task:
    """The task with its documents made for a model, where they depend on it.

    Args:
        encode: text -> token ids.
        max_length: positions of the model.

    Raises:
        UserError: the model is too small for the task.
    """
    if task.benchmark.fit is None:
        return task
    answer = task.benchmark.answer
    answer_tokens = answer.max_new_tokens if isinstance(answer, Write) else 0
    return _with_items(replace(task, subjects=task.benchmark.fit(task.subjects, encode, max_length, answer_tokens)))


def _with_limit(subject: Subject, max_new_tokens: int) -> Subject:
    if not isinstance(subject.answer, Write):
        return subject
    return replace(subject, answer=replace(subject.answer, max_new_tokens=max_new_tokens))


def _with_items(task: Task) -> Task:
    items = tuple(
        Item(
            subject=subject,
            document=document,
            question=request(task.benchmark, subject, document, task.num_fewshot),
        )
        for subject in task.subjects
        for document in subject.documents[: task.max_eval_samples]
    )
    if not items:
        raise UserError(f"--task {task.name}: its data hold no question for this model")
    return replace(task, items=items, prompts_hash=_hash(asdict(item.question) for item in items))


def _rows(subjects: Iterable[Subject]) -> Iterable[Any]:
    for subject in subjects:
        for documents in (subject.shots, subject.documents):
            for document in documents:
                yield [subject.name, document.index, _plain(document.fields)]


def _plain(fields: Fields) -> dict[str, Any]:
    return dict(fields)


def _hash(rows: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()
