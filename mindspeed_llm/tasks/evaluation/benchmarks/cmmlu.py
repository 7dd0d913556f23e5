"""CMMLU: questions of 67 subjects in Chinese with four options (haonan-li/CMMLU)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mindspeed_llm.tasks.evaluation.benchmark import Document, Subject
from mindspeed_llm.tasks.evaluation.benchmarks.cmmlu_subjects import NAMES
from mindspeed_llm.tasks.evaluation.four_choices import documents, letter_benchmarks, load_with_dev, title_of
from mindspeed_llm.tasks.evaluation.rows import read_csv


def _read(file: Path, subject: str) -> tuple[Document, ...]:
    return documents(read_csv(file), file, subject, question="Question", answer="Answer")


def _title(subject: str) -> str:
    return title_of(subject, NAMES, benchmark="cmmlu", suffix=".csv")


def _description(subject: str) -> str:
    return f"以下是关于{_title(subject)}的单项选择题，请直接给出正确答案的选项。\n\n"


def load(path: Path, describe: Callable[[str], str] = _description) -> tuple[Subject, ...]:
    """The subjects `<subject>.csv` of a folder, with examples from `../dev/<subject>.csv`."""
    return load_with_dev(path, _read, suffix=".csv", dev_suffix=".csv", describe=describe)


BENCHMARK = letter_benchmarks("cmmlu", load, describe=_description, titles=_title, language="zh")
