"""C-Eval: questions of 52 subjects in Chinese with four options (hkust-nlp/ceval); its validation set has answers."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.tasks.evaluation.benchmark import Document, Subject
from mindspeed_llm.tasks.evaluation.benchmarks.ceval_subjects import NAMES
from mindspeed_llm.tasks.evaluation.four_choices import documents, letter_benchmark, load_with_dev, title_of
from mindspeed_llm.tasks.evaluation.rows import read_csv


def _read(file: Path, subject: str) -> tuple[Document, ...]:
    return documents(read_csv(file), file, subject, question="question", answer="answer")


def _description(subject: str) -> str:
    title = title_of(subject, NAMES, benchmark="ceval", suffix="_val.csv")
    return f"以下是中国关于{title}的单项选择题，请选出其中的正确答案。\n\n"


def load(path: Path) -> tuple[Subject, ...]:
    """The subjects `<subject>_val.csv` of a folder, with examples from `../dev/<subject>_dev.csv`."""
    return load_with_dev(path, _read, suffix="_val.csv", dev_suffix="_dev.csv", describe=_description)


BENCHMARK = letter_benchmark("ceval", load, "答案：")
