"""evaluation.py's scoring against lm-eval with its model for transformers, on the same prompts, in turns.

    python -m benchmarks.evaluate --model output/smollm2 --data DIR [--rounds 5] [--parts mmlu gsm8k command]

DIR has folders mmlu and gsm8k in the benchmarks' original layout. Three parts:

    mmlu     likelihoods of four letters after 5 examples, 7 questions of each subject: at most 0.40 of lm-eval's time
    gsm8k    10 written answers after two examples: at most 0.8 of its time
    command  20 questions of one subject as a whole command, from start to results: at most half of its time

Both sides have the same threads. Under other load the seconds of the processor say more than those of the clock; both
are printed. Numbers and texts of the sides are compared as well.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import lm_eval_tasks
from benchmarks.ratios import speed_ratio
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, request
from mindspeed_llm.tasks.evaluation.registry import find
from mindspeed_llm.tasks.evaluation.requests import Generate, LogLikelihood

BARS = {"mmlu": 1 / 0.40, "gsm8k": 1 / 0.8, "command": 1 / 0.5}
"""Speed of ours over the peer's."""
PARTS = tuple(BARS)
_BATCH_SIZE = 8
"""Of written answers, as evaluation.py has it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Two ways to do the same work; each returns what can be compared."""

    name: str
    ours: Callable[[], Any]
    peer: Callable[[], Any]
    difference: Callable[[Any, Any], str]
    """What to say of the two results."""
    seconds: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"ours": [], "peer": []})
    """(clock, processor) of each round."""

    def run(self) -> None:
        """One round, ours first."""
        results = []
        for side, work in (("ours", self.ours), ("peer", self.peer)):
            clock, processor = time.perf_counter(), _processor_seconds()
            results.append(work())
            self.seconds[side].append((time.perf_counter() - clock, _processor_seconds() - processor))
        ours, peer = (self.seconds[side][-1] for side in ("ours", "peer"))
        print(
            f"{self.name}: ours {ours[0]:.1f} s ({ours[1]:.1f} s of processor), lm-eval {peer[0]:.1f} s "
            f"({peer[1]:.1f} s); {self.difference(*results)}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )

    def report(self) -> None:
        """The ratios of all rounds, and whether the bar holds."""
        for place, what in enumerate(("clock", "processor")):
            times = {side: [pair[place] for pair in pairs] for side, pairs in self.seconds.items()}
            ratio = speed_ratio(f"{self.name}, speed by {what}", ours=times["ours"], peer=times["peer"])
            print(ratio.line(BARS[self.name]), flush=True)


def _processor_seconds() -> float:
    """Of this process and its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _load(model: Path) -> tuple[Any, Any]:
    """The model on both sides: (ours, lm-eval's)."""
    from lm_eval.models.huggingface import HFLM

    from mindspeed_llm.tasks.evaluation.arguments import evaluation_arguments
    from mindspeed_llm.tasks.inference.load import load_causal_lm

    ours = load_causal_lm(evaluation_arguments(["--load", str(model)]))
    # On a CPU its batches of one are its fastest: nothing is filled up.
    return ours, HFLM(pretrained=str(model), dtype="float32", device="cpu", batch_size=1)


def _questions(benchmark: Benchmark, data: Path, *, subjects: int | None, each: int, shots: int) -> list[list[Any]]:
    """What is asked, by subject."""
    found = []
    for subject in benchmark.load(data)[:subjects]:
        found.append([request(benchmark, subject, document, shots) for document in subject.documents[:each]])
    return found


def _instances(kind: str, arguments: Sequence[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def mmlu(lm: Any, peer: Any, data: Path, *, subjects: int | None, each: int) -> Part:
    """Likelihoods, asked by subject as evaluation.py does, and all at once as lm-eval does."""
    asked: list[list[LogLikelihood]] = _questions(
        find("mmlu_ppl"), data / "mmlu/test", subjects=subjects, each=each, shots=5
    )
    pairs = [[(question.context, text) for question in part for text in question.continuations] for part in asked]

    def ours() -> list[float]:
        return [
            found.logprob
            for part in pairs
            for found in lm.loglikelihood([context for context, _ in part], [text for _, text in part])
        ]

    def theirs() -> list[float]:
        requests = _instances("loglikelihood", [pair for part in pairs for pair in part])
        return [value for value, _ in peer.loglikelihood(requests, disable_tqdm=True)]

    def difference(mine: list[float], other: list[float]) -> str:
        largest = max(abs(a - b) for a, b in zip(mine, other, strict=True))
        assert largest < 1e-3, f"the two do not compute the same: log-probabilities differ by {largest}"
        return f"{len(mine) // 4} questions, largest difference of a log-probability {largest:.1e}"

    return Part(name="mmlu", ours=ours, peer=theirs, difference=difference)


def gsm8k(lm: Any, peer: Any, data: Path, *, count: int) -> Part:
    """Written answers."""
    ((*asked,),) = _questions(find("gsm8k"), data / "gsm8k", subjects=1, each=count, shots=2)
    questions: list[Generate] = list(asked)

    def ours() -> list[str]:
        requests = [
            lm.request(question.prompt, max_new_tokens=question.max_new_tokens, stop=question.stop)
            for question in questions
        ]
        return [answer.text for answer in lm.generate(requests, batch_size=_BATCH_SIZE)]

    def theirs() -> list[str]:
        arguments = [
            (question.prompt, {"until": list(question.stop), "max_gen_toks": question.max_new_tokens})
            for question in questions
        ]
        return peer.generate_until(_instances("generate_until", arguments), disable_tqdm=True)

    def difference(mine: list[str], other: list[str]) -> str:
        same = sum(a == b for a, b in zip(mine, other, strict=True))
        return f"{len(mine)} answers, {same} the same"

    return Part(name="gsm8k", ours=ours, peer=theirs, difference=difference)


def command(model: Path, data: Path, folder: Path, *, count: int) -> Part:
    """Whole commands on the first subject of mmlu."""
    (name, *_) = lm_eval_tasks.write_mmlu(data / "mmlu", folder / "tasks")
    subject = name.removeprefix("local_mmlu_")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    def run(arguments: Sequence[str | Path]) -> None:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(map(str, arguments))} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")

    def ours() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as output:
            flags = ["--load", model, "--task", "mmlu_ppl", "--task-data-path", data / f"mmlu/test/{subject}_test.csv"]
            flags += ["--num-fewshot", "5", "--max-eval-samples", str(count), "--output-dir", f"{output}/ours"]
            run(["evaluation.py", *flags])

    def theirs() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as output:
            flags = ["--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu"]
            flags += ["--tasks", name, "--include_path", folder / "tasks", "--num_fewshot", "5"]
            flags += ["--limit", str(count), "--output_path", output, "--log_samples"]
            run(["-m", "lm_eval", "run", *flags])

    return Part(name="command", ours=ours, peer=theirs, difference=lambda *_: f"{count} questions of {subject}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--subjects", type=int, help="mmlu: the first so many subjects only")
    parser.add_argument("--each", type=int, default=7, help="mmlu: questions of each subject")
    parser.add_argument("--answers", type=int, default=10, help="gsm8k: answers")
    parser.add_argument("--questions", type=int, default=20, help="command: questions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        parts = []
        if {"mmlu", "gsm8k"} & set(arguments.parts):
            lm, peer = _load(arguments.model)
            if "mmlu" in arguments.parts:
                parts.append(mmlu(lm, peer, arguments.data, subjects=arguments.subjects, each=arguments.each))
            if "gsm8k" in arguments.parts:
                parts.append(gsm8k(lm, peer, arguments.data, count=arguments.answers))
        if "command" in arguments.parts:
            parts.append(
                command(arguments.model.resolve(), arguments.data.resolve(), Path(scratch), count=arguments.questions)
            )
        for part in parts:
            for _ in range(arguments.rounds):
                part.run()
        for part in parts:
            part.report()


if __name__ == "__main__":
    main()
