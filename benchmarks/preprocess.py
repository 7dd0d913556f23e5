"""Speed, start-up and memory of preprocessing, against the `tokenizers` library alone.

    python -m benchmarks.preprocess --corpus data/c4_demo.jsonl --tokenizer output/models/smollm2_135m

Both sides of a ratio run in turns, each time in a process of its own (see `benchmarks.preprocess_side`): ours is the
whole command without the start of Python, the floor is encode_batch with the same threads plus writing the ids raw. The
corpus (jsonl with a key `text`) is repeated to the sizes asked for. For gigatoken a BPE vocabulary that has every byte
is trained on it. `--parts` selects what is measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from benchmarks.preprocess_side import command
from benchmarks.ratios import Ratio, speed_ratio

PARTS = ("tokenizers", "gigatoken", "start", "memory")
FLOOR_BAR, GIGATOKEN_BAR = 0.95, 4.0
START_BAR_S = 4.0
MEMORY_BAR_MB, FLAT_BAR = 400, 1.1
_ROOT = Path(__file__).parents[1]
_SAMPLE_SECONDS = 0.02
_END = "<|endoftext|>"


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl file with the key text")
    parser.add_argument("--tokenizer", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--megabytes", type=float, default=30.0, help="size of the input of the ratios")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--memory-megabytes", type=float, nargs=2, default=[100.0, 400.0])
    parser.add_argument("--vocab-size", type=int, default=16000, help="of the vocabulary that is trained")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        Benchmark(arguments, Path(folder)).run()


class Benchmark:
    """The measurements that `arguments` select; inputs and outputs stand in `folder`."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder

    def run(self) -> None:
        """Measure and print, part by part."""
        for part in self._arguments.parts:
            getattr(self, f"_{part}")()

    def _tokenizers(self) -> None:
        for workers in self._arguments.workers:
            self._ratio("text", self._arguments.tokenizer, workers, FLOOR_BAR)

    def _gigatoken(self) -> None:
        if importlib.util.find_spec("gigatoken") is None:
            _say("gigatoken is not installed: that part is left out")
            return
        for workers in self._arguments.workers:
            self._ratio("text with gigatoken", self._trained(), workers, GIGATOKEN_BAR)

    def _ratio(self, name: str, tokenizer: Path, workers: int, bar: float) -> None:
        source = self._repeated(self._arguments.megabytes)
        seconds: dict[str, list[float]] = {"ours": [], "floor": []}
        for _ in range(self._arguments.pairs):
            for side, found in seconds.items():
                found.append(self._side(side, source, tokenizer, workers))
        for side, found in seconds.items():
            speed = self._arguments.megabytes / statistics.median(found)
            shown = " ".join(f"{value:.2f}" for value in found)
            _say(f"{name}, {workers} workers, {side}: {shown} s, {speed:.2f} MB/s")
        ratio = speed_ratio(f"speed of {name} / floor, {workers} workers", ours=seconds["ours"], peer=seconds["floor"])
        _say(ratio.line(bar))

    def _side(self, side: str, source: Path, tokenizer: Path, workers: int) -> float:
        module = [sys.executable, "-m", "benchmarks.preprocess_side", "--side", side, "--workers", str(workers)]
        files = ["--input", str(source), "--tokenizer", str(tokenizer), "--output", str(self._folder / "output" / side)]
        (self._folder / "output").mkdir(exist_ok=True)
        return json.loads(_run([*module, *files]).splitlines()[-1])["seconds"]

    def _start(self) -> None:
        source = self._folder / "hundred.jsonl"
        with self._arguments.corpus.open(encoding="utf-8") as stream:
            source.write_text("".join(itertools.islice(itertools.cycle(stream.readlines()), 100)), encoding="utf-8")
        seconds = []
        for _ in range(self._arguments.pairs):
            start = time.perf_counter()
            _run(self._command(source, self._arguments.tokenizer, 1))
            seconds.append(time.perf_counter() - start)
        ratio = Ratio(name="seconds of a command of 100 documents", values=tuple(seconds))
        verdict = "holds" if ratio.median < START_BAR_S else "MISSED"
        _say(f"{ratio.line()}; bar below {START_BAR_S:.0f} {verdict}")

    def _memory(self) -> None:
        tokenizers = {"": self._arguments.tokenizer}
        if importlib.util.find_spec("gigatoken") is not None:
            tokenizers[" with gigatoken"] = self._trained()
        for name, tokenizer in tokenizers.items():
            peaks = []
            for megabytes in self._arguments.memory_megabytes:
                peaks.append(peak_megabytes(self._command(self._repeated(megabytes), tokenizer, 2)))
                _say(f"peak memory of all processes{name}, 2 workers, {megabytes:g} MB of input: {peaks[-1]:.0f} MB")
            growth = peaks[1] / peaks[0]
            holds = max(peaks) <= MEMORY_BAR_MB and growth <= FLAT_BAR
            _say(
                f"growth of peak memory{name}: {growth:.3f}; bar at most {MEMORY_BAR_MB} MB and {FLAT_BAR:.2f} times "
                + ("holds" if holds else "MISSED")
            )

    def _command(self, source: Path, tokenizer: Path, workers: int) -> list[str]:
        prefix = self._folder / "output" / "command"
        return [sys.executable, str(_ROOT / "preprocess_data.py"), *command(source, tokenizer, prefix, workers)]

    def _repeated(self, megabytes: float) -> Path:
        """The corpus, repeated to a size."""
        file = self._folder / f"{megabytes:g}.jsonl"
        if not file.exists():
            lines = self._arguments.corpus.read_bytes().splitlines(keepends=True)
            size = 0
            with file.open("wb") as stream:
                for line in itertools.cycle(lines):
                    if size >= megabytes * 1e6:
                        break
                    size += stream.write(line)
        return file

    def _trained(self) -> Path:
        """A directory with a byte-level BPE vocabulary that has every byte, trained on the corpus."""
        folder = self._folder / "trained"
        if folder.exists():
            return folder
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self._arguments.vocab_size,
            special_tokens=[_END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        with self._arguments.corpus.open(encoding="utf-8") as stream:
            tokenizer.train_from_iterator((json.loads(line)["text"] for line in stream), trainer)
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "TokenizersBackend", "eos_token": _END}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder


def peak_megabytes(arguments: list[str]) -> float:
    """The most memory (RSS, MB) that a command and all its children hold together, sampled."""
    peak = 0.0
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, text=True, cwd=_ROOT) as process,
    ):
        root = psutil.Process(process.pid)
        finished = threading.Event()
        while process.poll() is None:
            peak = max(peak, _tree_bytes(root) / 1e6)
            finished.wait(_SAMPLE_SECONDS)
        output.seek(0)
        if process.returncode:
            sys.exit(f"{' '.join(arguments)} failed:\n{output.read()}")
    return peak


def _tree_bytes(root: psutil.Process) -> int:
    total = 0
    try:
        for process in (root, *root.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.Error:
        # One has ended meanwhile; the next sample counts without it.
        return total
    return total


def _run(arguments: list[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=_ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
