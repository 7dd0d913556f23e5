"""CMMLU: questions of 67 subjects in Chinese with four options (haonan-li/CMMLU)."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.tasks.evaluation.benchmark import Document, Subject
from mindspeed_llm.tasks.evaluation.benchmarks.cmmlu_subjects import NAMES
from mindspeed_llm.tasks.evaluation.four_choices import documents, letter_benchmark, load_with_dev, title_of
from mindspeed_llm.tasks.evaluation.rows import read_csv


def _read(file: Path, subject: str) -> tuple[Document, ...]:
    return documents(read_csv(file), file, subject, question="Question", answer="Answer")


def _description(subject: str) -> str:
    title = title_of(subject, NAMES, benchmark="cmmlu", suffix=".csv")
    return f"以下是关于{title}的单项选择题，请直接给出正确答案的选项。\n\n"


def load(path: Path) -> tuple[Subject, ...]:
    """The subjects `<subject>.csv` of a folder, with examples from `../dev/<subject>.csv`."""
    return load_with_dev(path, _read, suffix=".csv", dev_suffix=".csv", describe=_description)


BENCHMARK = letter_benchmark("cmmlu", load, "答案：")
