"""The benchmarks by the names that `--task` takes."""

from __future__ import annotations

import difflib

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark
from mindspeed_llm.tasks.evaluation.benchmarks import (
    agieval,
    bbh,
    boolq,
    ceval,
    cmmlu,
    gsm8k,
    hellaswag,
    human_eval,
    mmlu,
    needlebench,
)

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        agieval.BENCHMARK,
        bbh.BENCHMARK,
        boolq.BENCHMARK,
        ceval.BENCHMARK,
        cmmlu.BENCHMARK,
        gsm8k.BENCHMARK,
        hellaswag.BENCHMARK,
        human_eval.BENCHMARK,
        mmlu.MMLU,
        mmlu.MMLU_PPL,
        needlebench.BENCHMARK,
    )
}


def find(name: str) -> Benchmark:
    """The benchmark of that name. Raises UserError: there is none."""
    if name not in BENCHMARKS:
        if "," in name:
            raise UserError(f"--task {name}: names are parted by blanks; write --task {' '.join(_parts(name))}")
        plain = name.lower().replace("-", "_")
        near = [plain] if plain in BENCHMARKS else difflib.get_close_matches(plain, BENCHMARKS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"--task: there is no benchmark {name!r}, expected one of {', '.join(BENCHMARKS)}.{hint}")
    return BENCHMARKS[name]


def _parts(name: str) -> list[str]:
    return [part.strip() for part in name.split(",") if part.strip()]
