"""evaluation.py against lm-eval with its model for transformers, sample by sample.

    python -m tests.tasks.evaluation.lm_eval_parity --model DIR --data DIR --folder DIR [--limit N] [--tasks NAME ...]
        [--max-new-tokens N] [--chat]

DIR of --data has folders named after benchmarks (mmlu, cmmlu, agieval, human_eval, gsm8k, bbh), in their original
layout; what it lacks is left out. Beside them come questions of our own of all benchmarks but gsm8k and bbh. lm-eval
makes the prompts, asks, filters and judges by its own task files, over the same questions; see
`benchmarks.lm_eval_tasks` and, for human_eval, `lm_eval_human_eval`. Ends non-zero where a sample differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import lm_eval_tasks
from mindspeed_llm.tasks.evaluation.main import main as evaluate
from tests.tasks.evaluation import lm_eval_human_eval, own_questions
from tests.tasks.evaluation.lm_eval_differences import Sample, differences


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How one benchmark is asked on both sides."""

    write: Callable[[Path, Path], list[str]]
    """Writes lm-eval's task files for (folder of the data, folder for task files); gives the tasks' names."""
    benchmark: str
    """Names the folder of its data."""
    path: str = ""
    """What --task-data-path names below that folder."""
    num_fewshot: int = 0


def _write_gsm8k(data: Path, tasks: Path) -> list[str]:
    (train,) = data.glob("train*.jsonl")
    return lm_eval_tasks.write_gsm8k(data / "test.jsonl", train, tasks)


def _write_human_eval(data: Path, tasks: Path) -> list[str]:
    (file,) = data.glob("HumanEval.jsonl*")
    return lm_eval_human_eval.write(file, tasks)


_WAYS: Mapping[str, _Way] = {
    "mmlu_ppl": _Way(write=lm_eval_tasks.write_mmlu, benchmark="mmlu", path="test", num_fewshot=5),
    "mmlu": _Way(
        write=partial(lm_eval_tasks.write_mmlu, kind="generative"), benchmark="mmlu", path="test", num_fewshot=5
    ),
    "gsm8k": _Way(write=_write_gsm8k, benchmark="gsm8k", num_fewshot=2),
    "bbh": _Way(write=lm_eval_tasks.write_bbh, benchmark="bbh", num_fewshot=3),
    "ceval": _Way(
        write=lambda data, tasks: lm_eval_tasks.write_choices("ceval", data / "val", tasks),
        benchmark="ceval",
        path="val",
        num_fewshot=5,
    ),
    "cmmlu": _Way(
        write=lambda data, tasks: lm_eval_tasks.write_choices("cmmlu", data / "test", tasks),
        benchmark="cmmlu",
        path="test",
        num_fewshot=5,
    ),
    "hellaswag": _Way(
        write=lambda data, tasks: lm_eval_tasks.write_hellaswag(data / "hellaswag_val.jsonl", tasks),
        benchmark="hellaswag",
    ),
    "boolq": _Way(write=lambda data, tasks: lm_eval_tasks.write_boolq(data / "dev.jsonl", tasks), benchmark="boolq"),
    "agieval": _Way(write=lm_eval_tasks.write_agieval, benchmark="agieval"),
    "human_eval": _Way(write=_write_human_eval, benchmark="human_eval"),
}
TASKS = tuple(_WAYS)
CHAT_TASKS = tuple(name for name in TASKS if name != "human_eval")
"""In a conversation human_eval is asked with an instruction, which lm-eval words in another way."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One benchmark on both sides."""

    task: str
    """As --task of evaluation.py has it."""
    source: str
    """Whose questions: "own" or "data"."""
    path: Path
    num_fewshot: int
    names: dict[str, str]
    """Subject -> lm-eval's task."""
    folder: Path
    """For lm-eval's task files, and for our results."""


def prepare(data: Path, folder: Path, tasks: Collection[str] = TASKS, *, is_chat: bool = False) -> Iterator[Compared]:
    """Write task files for lm-eval, our own questions, and for bbh the examples that lm-eval has, below `folder`."""
    for task in tasks:
        way = _WAYS[task]
        own = folder / "own" / way.benchmark
        if way.benchmark in own_questions.WRITERS:
            own_questions.WRITERS[way.benchmark](own)
        for source, questions in (("own", own), ("data", data / way.benchmark)):
            if questions.is_dir():
                yield _compared(task, source, questions, folder / f"{task}-{source}", is_chat=is_chat)


def _compared(task: str, source: str, questions: Path, folder: Path, *, is_chat: bool) -> Compared:
    way = _WAYS[task]
    names = way.write(questions, folder / "tasks")
    if task == "bbh":
        questions = _with_prompts(questions, folder / "questions")
    if is_chat:
        lm_eval_tasks.describe_in_questions(folder / "tasks", names)
    return Compared(
        task=task,
        source=source,
        path=questions / way.path,
        num_fewshot=0 if is_chat else way.num_fewshot,
        names={name.removeprefix("local_").removeprefix(f"{way.benchmark}_"): name for name in names},
        folder=folder,
    )


def _with_prompts(bbh: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for file in bbh.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
        lm_eval_tasks.write_bbh_prompts(folder / "cot-prompts", file.stem)
    return folder


def ours(
    compared: Compared, model: Path, limit: int, *, is_chat: bool = False, max_new_tokens: int | None = None
) -> list[Sample]:
    """The lines of samples.jsonl of one run of evaluation.py."""
    output = compared.folder / "ours"
    flags: dict[str, object] = {
        "--task": compared.task,
        "--task-data-path": compared.path,
        "--load": model,
        "--num-fewshot": compared.num_fewshot,
        "--max-eval-samples": limit,
        "--output-dir": output,
    }
    if max_new_tokens is not None:
        flags["--max-new-tokens"] = max_new_tokens
    words = [str(part) for pair in flags.items() for part in pair]
    words += ["--allow-code-execution"] * (compared.task == "human_eval") + ["--hf-chat-template"] * is_chat
    assert evaluate(words) == 0
    return [json.loads(line) for line in (output / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def theirs(
    compared: Compared, lm: Any, limit: int, *, is_chat: bool = False, max_new_tokens: int | None = None
) -> dict[str, list[Sample]]:
    """The samples of each of lm-eval's tasks, asked of an lm-eval model."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=list(compared.names.values()),
        task_manager=TaskManager(include_path=str(compared.folder / "tasks"), include_defaults=False),
        num_fewshot=compared.num_fewshot,
        limit=limit,
        bootstrap_iters=0,
        apply_chat_template=is_chat,
        gen_kwargs=None if max_new_tokens is None else {"max_gen_toks": max_new_tokens},
        confirm_run_unsafe_code=True,
    )
    return found["samples"]


def compare(
    model: Path,
    data: Path,
    folder: Path,
    limit: int,
    tasks: Collection[str] = TASKS,
    *,
    is_chat: bool = False,
    max_new_tokens: int | None = None,
) -> Iterator[tuple[Compared, list[Sample], list[str]]]:
    """Run both sides; each benchmark with our samples, and a line for each that differs.

    Args:
        model: in Hugging Face's layout.
        data: see the module.
        folder: for task files and results.
        limit: samples of each subject, at most.
        tasks: as --task has them.
        is_chat: ask under the tokenizer's chat template, without examples.
        max_new_tokens: of an answer, on both sides; None: as the benchmarks have it.
    """
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1)
    settings: dict[str, Any] = {"is_chat": is_chat, "max_new_tokens": max_new_tokens}
    for compared in prepare(data, folder, tasks, is_chat=is_chat):
        mine, other = ours(compared, model, limit, **settings), theirs(compared, lm, limit, **settings)
        yield compared, mine, list(differences(compared.task, compared.names, mine, other, is_chat=is_chat))


def _right(samples: Sequence[Sample]) -> str:
    metrics = dict.fromkeys(metric for sample in samples for metric in sample["correct"])
    return ", ".join(
        f"{metric} {sum(sample['correct'].get(metric, False) for sample in samples)}" for metric in metrics
    )


def main() -> int:
    """Compare on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for task files and results")
    parser.add_argument("--limit", type=int, default=20, help="samples of each subject")
    parser.add_argument("--tasks", nargs="+", choices=TASKS)
    parser.add_argument("--max-new-tokens", type=int, help="of an answer, on both sides; default: each benchmark's")
    parser.add_argument("--chat", action="store_true", help="under the tokenizer's chat template, without examples")
    arguments = parser.parse_args()
    failed = False
    for compared, mine, different in compare(
        arguments.model,
        arguments.data,
        arguments.folder,
        arguments.limit,
        arguments.tasks or (CHAT_TASKS if arguments.chat else TASKS),
        is_chat=arguments.chat,
        max_new_tokens=arguments.max_new_tokens,
    ):
        print(
            f"{compared.task} ({compared.source}): {len(mine)} samples, {len(different)} differ; right: {_right(mine)}",
            *different,
            sep="\n",
            flush=True,
        )
        failed |= bool(different) or not mine
    return failed


if __name__ == "__main__":
    sys.exit(main())
