"""CMMLU: questions of 67 subjects in Chinese with four options (haonan-li/CMMLU)."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Document, Subject
from mindspeed_llm.tasks.evaluation.benchmarks.cmmlu_subjects import NAMES
from mindspeed_llm.tasks.evaluation.four_choices import (
    CHOOSE_LETTER,
    documents,
    load_with_dev,
    prompt_ending_in,
    target,
)
from mindspeed_llm.tasks.evaluation.rows import read_csv


def _read(file: Path, subject: str) -> tuple[Document, ...]:
    return documents(read_csv(file), file, subject, question="Question", answer="Answer")


def _description(subject: str) -> str:
    if subject not in NAMES:
        raise UserError(
            f"cmmlu: {subject}.csv is named after none of the benchmark's {len(NAMES)} subjects, "
            "expected a name such as logical.csv. Give the folder with the benchmark's own files."
        )
    return f"以下是关于{NAMES[subject]}的单项选择题，请直接给出正确答案的选项。\n\n"


def load(path: Path) -> tuple[Subject, ...]:
    """The subjects `<subject>.csv` of a folder, with examples from `../dev/<subject>.csv`."""
    return load_with_dev(path, _read, suffix=".csv", dev_suffix=".csv", describe=_description)


BENCHMARK = Benchmark(
    name="cmmlu",
    version="1",
    load=load,
    prompt=prompt_ending_in("答案："),
    target=target,
    answer=CHOOSE_LETTER,
    headline="acc",
    num_fewshot=5,
)
