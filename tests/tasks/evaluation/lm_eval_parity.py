"""evaluation.py against lm-eval with its model for transformers, sample by sample.

    python -m tests.tasks.evaluation.lm_eval_parity --model DIR --data DIR --folder DIR [--limit N] [--tasks NAME ...]

DIR of --data has folders mmlu, gsm8k and bbh in the benchmarks' original layout. Ends non-zero where a sample differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import lm_eval_tasks
from mindspeed_llm.tasks.evaluation.main import main as evaluate

TASKS = ("mmlu_ppl", "gsm8k", "bbh")
TOLERANCE = 1e-4
Sample = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One benchmark on both sides."""

    task: str
    """As --task of evaluation.py has it."""
    path: Path
    num_fewshot: int
    names: dict[str, str]
    """Subject -> lm-eval's task."""
    differences: list[str] = field(default_factory=list)


def prepare(data: Path, folder: Path) -> list[Compared]:
    """Task files for lm-eval in `folder`, and for bbh the examples that lm-eval has."""
    tasks = folder / "tasks"
    mmlu = lm_eval_tasks.write_mmlu(data / "mmlu", tasks)
    (train,) = (data / "gsm8k").glob("train*.jsonl")
    gsm8k = lm_eval_tasks.write_gsm8k(data / "gsm8k/test.jsonl", train, tasks)
    bbh = lm_eval_tasks.write_bbh(data / "bbh", tasks)
    for file in (data / "bbh").glob("*.json"):
        (folder / "bbh").mkdir(exist_ok=True)
        (folder / "bbh" / file.name).write_bytes(file.read_bytes())
        lm_eval_tasks.write_bbh_prompts(folder / "bbh/cot-prompts", file.stem)
    return [
        Compared(
            task="mmlu_ppl",
            path=data / "mmlu/test",
            num_fewshot=5,
            names={name.removeprefix("local_mmlu_"): name for name in mmlu},
        ),
        Compared(task="gsm8k", path=data / "gsm8k", num_fewshot=2, names={"gsm8k": gsm8k[0]}),
        Compared(
            task="bbh",
            path=folder / "bbh",
            num_fewshot=3,
            names={name.removeprefix("local_bbh_"): name for name in bbh},
        ),
    ]


def ours(compared: Compared, model: Path, folder: Path, limit: int) -> list[Sample]:
    """The lines of samples.jsonl of one run of evaluation.py."""
    output = folder / compared.task
    flags = {
        "--task": compared.task,
        "--task-data-path": compared.path,
        "--load": model,
        "--num-fewshot": compared.num_fewshot,
        "--max-eval-samples": limit,
        "--output-dir": output,
    }
    assert evaluate([str(part) for pair in flags.items() for part in pair]) == 0
    return [json.loads(line) for line in (output / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def theirs(compared: Compared, lm: Any, folder: Path, limit: int) -> dict[str, list[Sample]]:
    """The samples of each of lm-eval's tasks, asked of an lm-eval model."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=list(compared.names.values()),
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        num_fewshot=compared.num_fewshot,
        limit=limit,
        bootstrap_iters=0,
    )
    return found["samples"]


def differences(compared: Compared, mine: list[Sample], other: Mapping[str, list[Sample]]) -> Iterator[str]:
    """A line for each sample that differs: in its prompt, its numbers or text, what was read, or the verdict."""
    asked = {
        (subject, sample["doc_id"], sample["filter"]): sample
        for subject, name in compared.names.items()
        for sample in other[name]
    }
    places = {(subject, index) for subject, index, _ in asked}
    if places != {(sample["subject"], sample["index"]) for sample in mine}:
        yield f"{compared.task}: other samples were asked"
        return
    filters = {name for _, _, name in asked}
    for sample in mine:
        for name in filters:
            found = asked[sample["subject"], sample["index"], name]
            if wrong := [what for what, same in _compare(sample, found, name) if not same]:
                yield (
                    f"{compared.task}, {sample['subject']} {sample['index']}, {name}: other {', '.join(wrong)}: "
                    f"{sample['raw']!r} and {found['resps']!r}"
                )


def _compare(mine: Sample, other: Sample, name: str) -> Iterator[tuple[str, bool]]:
    yield "prompt", all(arguments[0] == mine["prompt"] for arguments in other["arguments"])
    if isinstance(mine["raw"], str):
        yield "text", mine["raw"] == other["resps"][0][0]
        reading = other["filtered_resps"]
        yield "reading", mine["extracted"][name] == (reading if isinstance(reading, str) else reading[0])
        yield "verdict", mine["correct"][name] == bool(other["exact_match"])
        return
    values = [float(response[0][0]) for response in other["resps"]]
    yield "count", len(values) == len(mine["raw"])
    yield "numbers", all(abs(a - b) < TOLERANCE for a, b in zip(mine["raw"], values, strict=True))
    yield "verdict", mine["correct"]["acc"] == bool(other["acc"])


def compare(
    model: Path, data: Path, folder: Path, limit: int, tasks: Collection[str] = TASKS
) -> Iterator[tuple[Compared, int]]:
    """Run both sides; each benchmark with its differences, and how many samples were compared."""
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1)
    for compared in (found for found in prepare(data, folder) if found.task in tasks):
        mine = ours(compared, model, folder, limit)
        compared.differences.extend(differences(compared, mine, theirs(compared, lm, folder, limit)))
        yield compared, len(mine)


def main() -> int:
    """Compare on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for task files and results")
    parser.add_argument("--limit", type=int, default=20, help="samples of each subject")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    arguments = parser.parse_args()
    failed = False
    for compared, count in compare(arguments.model, arguments.data, arguments.folder, arguments.limit, arguments.tasks):
        print(f"{compared.task}: {count} samples, {len(compared.differences)} differ", flush=True)
        print("\n".join(compared.differences), flush=True)
        failed |= bool(compared.differences) or not count
    return failed


if __name__ == "__main__":
    sys.exit(main())
