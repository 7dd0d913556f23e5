"""C-Eval: questions of 52 subjects in Chinese with four options (hkust-nlp/ceval); its validation set has answers."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Document, Subject
from mindspeed_llm.tasks.evaluation.benchmarks.ceval_subjects import NAMES
from mindspeed_llm.tasks.evaluation.four_choices import (
    CHOOSE_LETTER,
    documents,
    load_with_dev,
    prompt_ending_in,
    target,
)
from mindspeed_llm.tasks.evaluation.rows import read_csv


def _read(file: Path, subject: str) -> tuple[Document, ...]:
    return documents(read_csv(file), file, subject, question="question", answer="answer")


def _description(subject: str) -> str:
    if subject not in NAMES:
        raise UserError(
            f"ceval: {subject}_val.csv is named after none of the benchmark's {len(NAMES)} subjects, "
            "expected a name such as logic_val.csv. Give the folder with the benchmark's own files."
        )
    return f"以下是中国关于{NAMES[subject]}的单项选择题，请选出其中的正确答案。\n\n"


def load(path: Path) -> tuple[Subject, ...]:
    """The subjects `<subject>_val.csv` of a folder, with examples from `../dev/<subject>_dev.csv`."""
    return load_with_dev(path, _read, suffix="_val.csv", dev_suffix="_dev.csv", describe=_description)


BENCHMARK = Benchmark(
    name="ceval",
    version="1",
    load=load,
    prompt=prompt_ending_in("答案："),
    target=target,
    answer=CHOOSE_LETTER,
    headline="acc",
    num_fewshot=5,
)
