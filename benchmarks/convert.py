"""What converting weights costs beside reading a model and writing as many bytes: both in turns, in fresh processes.

    python -m benchmarks.convert                     a dense model of 1.19 GB and a MoE of 0.84 GB, both directions
    python -m benchmarks.convert --upstream DIR      a checkout of MindSpeed-LLM converts them, too
    python -m benchmarks.convert --memory            peak memory at 28 and at 56 layers

Page cache warm; the conversion is the real command with its default verification. Work is what it reports: from opening
the source until all is on the disk; the floor's is the same without the import of torch, which safetensors needs for
bf16 as well. Compared are work time, time of the whole command, CPU time of the whole command, and peak memory that
belongs to no file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import convert_models
from benchmarks.ratios import Ratio

ROOT = Path(__file__).resolve().parent.parent
MEMORY_LIMIT_MB = 400
BAR = 1.5
_SPLIT = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2")
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # name: (configuration, how its Megatron checkpoint is split)
    "dense": (convert_models.DENSE, _SPLIT),
    "moe": (convert_models.MOE, (*_SPLIT, "--target-expert-parallel-size", "2", "--moe-grouped-gemm")),
}
_FAMILIES = {"dense": "qwen3", "moe": "qwen3-moe"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process from its start to its end."""

    whole: float
    cpu: float
    peak_mb: float
    work: float | None = None
    """Seconds, by its own account."""


def run(command: Sequence[str], *, cwd: Path = ROOT) -> tuple[Run, str]:
    """Run a command and measure it; gives its output, too. Ends this process where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1"}
    os.sync()  # what others left to write must not count
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    peak = [0]
    watch = threading.Thread(target=_watch, args=(process.pid, peak), daemon=True)
    watch.start()
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    whole = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    watch.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{output}")
    return Run(whole=whole, cpu=usage.ru_utime + usage.ru_stime, peak_mb=peak[0] / 1024), output


def _watch(pid: int, peak: list[int]) -> None:
    """Keep the largest amount of anonymous memory, in KiB, until the process has ended."""
    while True:
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        except OSError:
            return
        found = [line for line in status.splitlines() if line.startswith("RssAnon:")]
        if not found:  # it has ended, and nobody has asked for its exit code yet
            return
        peak[0] = max(peak[0], int(found[0].split()[1]))
        time.sleep(0.01)


def ours(source: Path, output: Path, flags: Sequence[str]) -> Run:
    """The real command."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "convert_ckpt_v2.py", "--load-dir", str(source), "--save-dir", str(output), *flags]
    measured, _ = run(command)
    work = json.loads((output / "conversion_report.json").read_text())["seconds"]
    return Run(whole=measured.whole, cpu=measured.cpu, peak_mb=measured.peak_mb, work=work)


def floor(model: Path, output: Path, sizes: Sequence[int]) -> Run:
    """Read the model, write files of these sizes."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.convert_floor", "--model", str(model), "--save-dir", str(output)]
    measured, text = run([*command, "--sizes", *map(str, sizes)])
    return Run(whole=measured.whole, cpu=measured.cpu, peak_mb=measured.peak_mb, work=float(text))


def upstream(checkout: Path, source: Path, output: Path, flags: Sequence[str]) -> Run:
    """The converter of a checkout of MindSpeed-LLM, with the same flags."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "convert_ckpt_v2.py", "--load-dir", str(source), "--save-dir", str(output), *flags]
    return run(command, cwd=checkout)[0]


def warm(folder: Path) -> None:
    """Read all files, so that they are in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(2**24):
                    pass


def sizes_of(folder: Path) -> list[int]:
    """The bytes of each weight file."""
    return [path.stat().st_size for path in sorted(folder.rglob("*")) if path.suffix in (".pt", ".safetensors")]


def compare(name: str, direction: str, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Measure one model in one direction, in turns; gives the lines that sum it up."""
    _, split = MODELS[name]
    model, megatron, output = folder / name, folder / f"{name}_mg", folder / "output"
    if direction == "hf -> mg":
        source, flags = model, [*split, "--model-type-hf", _FAMILIES[name]]
    else:
        source, flags = megatron, ["--load-model-type", "mg", "--save-model-type", "hf", "--hf-cfg-dir", str(model)]
        flags += ["--model-type-hf", _FAMILIES[name]]
        if not megatron.exists():
            ours(model, megatron, split)
    mine, theirs, others = [], [], []
    for number in range(1 if arguments.toy else 0, arguments.pairs + 1):
        warm(model)
        warm(source)
        mine.append(ours(source, output, flags))
        sizes = sizes_of(output)
        theirs.append(floor(model, folder / "floor", sizes))
        if arguments.upstream is not None:
            others.append(upstream(arguments.upstream, source, folder / "upstream", flags))
        if number == 0:  # brings libraries and models into the page cache
            mine, theirs, others = [], [], []
            continue
        print(f"{name}, {direction}, pair {number}: {_figures(mine[-1])}; floor: {_figures(theirs[-1])}", flush=True)
    for path in (output, folder / "floor", folder / "upstream"):
        shutil.rmtree(path, ignore_errors=True)

    def ratio(of: str, what: str, values: Sequence[float], peer: Sequence[float], bar: float | None) -> str:
        ratios = tuple(each / other for each, other in zip(values, peer, strict=True))
        line = Ratio(name=f"{name}, {direction}: {what} {of}", values=ratios)
        return line.line() + ("" if bar is None else f"; at most {bar:.2f}: {_holds(line, bar)}")

    to_floor = "of ours / floor's"
    lines = [
        ratio(to_floor, "work time", [each.work or 0 for each in mine], [each.work or 1 for each in theirs], BAR),
        ratio(to_floor, "whole command", [each.whole for each in mine], [each.whole for each in theirs], BAR),
        ratio(to_floor, "CPU time", [each.cpu for each in mine], [each.cpu for each in theirs], None),
        f"{name}, {direction}: peak {max(each.peak_mb for each in mine):.0f} MB beside mapped files (floor "
        f"{max(each.peak_mb for each in theirs):.0f}); at most {MEMORY_LIMIT_MB}: "
        f"{'holds' if max(each.peak_mb for each in mine) <= MEMORY_LIMIT_MB else 'MISSED'}",
    ]
    if others:
        whole = [each.whole for each in mine]
        lines.append(ratio("of upstream's / ours", "whole command", [each.whole for each in others], whole, None))
        lines.append(f"{name}, {direction}: upstream's peak {max(each.peak_mb for each in others):.0f} MB")
    return lines


def _holds(ratio: Ratio, bar: float) -> str:
    return "holds" if ratio.median <= bar + ratio.spread else "MISSED"


def _figures(measured: Run) -> str:
    return (
        f"work {measured.work:.2f} s, whole {measured.whole:.2f} s, CPU {measured.cpu:.2f} s, {measured.peak_mb:.0f} MB"
    )


def memory(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Peak memory at 28 and at 56 layers, several times each."""
    peaks: dict[int, list[float]] = {28: [], 56: []}
    for layers, found in peaks.items():
        config = convert_models.DENSE | {"num_hidden_layers": layers} | (convert_models.TINY if arguments.toy else {})
        model = convert_models.make(folder / f"layers{layers}", config)
        for _ in range(arguments.pairs):
            found.append(ours(model, folder / "output", _SPLIT).peak_mb)
    few, many = (statistics.median(found) for found in peaks.values())
    growth = many / few - 1
    return [
        f"peak beside mapped files: {few:.0f} MB at 28 layers, {many:.0f} MB at 56 ({growth:+.1%}); within 10 %: "
        f"{'holds' if growth <= 0.1 else 'MISSED'}"
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--directions", nargs="+", choices=("hf", "mg"), default=["hf", "mg"], help="kind of source")
    parser.add_argument("--pairs", type=int, default=5, help="beside one that is not counted")
    parser.add_argument("--memory", action="store_true", help="measure 28 against 56 layers instead")
    parser.add_argument("--upstream", type=Path, help="folder with another convert_ckpt_v2.py")
    parser.add_argument("--folder", type=Path, help="where to make models and outputs; default: a temporary folder")
    parser.add_argument("--toy", action="store_true", help="tiny models, to see that the benchmark runs")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="convert_", dir=arguments.folder) as name:
        folder = Path(name)
        if arguments.memory:
            print("\n".join(memory(folder, arguments)))
            return
        lines: list[str] = []
        for model in arguments.models:
            convert_models.make(folder / model, MODELS[model][0] | (convert_models.TINY if arguments.toy else {}))
            for source in arguments.directions:
                lines += compare(model, "hf -> mg" if source == "hf" else "mg -> hf", folder, arguments)
        print("\n".join(lines))


if __name__ == "__main__":
    main()
