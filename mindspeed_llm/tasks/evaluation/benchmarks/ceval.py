"""C-Eval: questions of 52 subjects in Chinese with four options (hkust-nlp/ceval); its validation set has answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mindspeed_llm.tasks.evaluation.benchmark import Document, Subject
from mindspeed_llm.tasks.evaluation.benchmarks.ceval_subjects import NAMES
from mindspeed_llm.tasks.evaluation.four_choices import documents, letter_benchmarks, load_with_dev, title_of
from mindspeed_llm.tasks.evaluation.rows import read_csv


def _read(file: Path, subject: str) -> tuple[Document, ...]:
    return documents(read_csv(file), file, subject, question="question", answer="answer")


def _title(subject: str) -> str:
    return title_of(subject, NAMES, benchmark="ceval", suffix="_val.csv")


def _description(subject: str) -> str:
    return f"以下是中国关于{_title(subject)}的单项选择题，请选出其中的正确答案。\n\n"


def load(path: Path, describe: Callable[[str], str] = _description) -> tuple[Subject, ...]:
    """The subjects `<subject>_val.csv` of a folder, with examples from `../dev/<subject>_dev.csv`."""
    return load_with_dev(path, _read, suffix="_val.csv", dev_suffix="_dev.csv", describe=describe)


BENCHMARK = letter_benchmarks("ceval", load, describe=_description, titles=_title, language="zh")
