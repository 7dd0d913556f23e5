"""One run of one side of `benchmarks.preprocess`, in a process of its own; prints one JSON object.

ours: the preprocessing command, from its flags to the published files. floor: what tokenizing cannot do without, the
texts being in memory already: `encode_batch` of the `tokenizers` library with the same number of threads, and writing
the ids raw to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

BATCH = 1000


def floor(arguments: argparse.Namespace) -> float:
    """Seconds to encode all texts and write their ids."""
    # The library reads these when it starts its threads.
    os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if arguments.workers > 1 else "false"
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(arguments.tokenizer) / "tokenizer.json"))
    with Path(arguments.input).open(encoding="utf-8") as stream:
        texts = [json.loads(line)["text"] for line in stream]
    start = time.perf_counter()
    with Path(f"{arguments.output}.raw").open("wb") as output:
        for begin in range(0, len(texts), BATCH):
            for encoding in tokenizer.encode_batch(texts[begin : begin + BATCH]):
                output.write(np.array(encoding.ids, dtype=np.int32).tobytes())
    return time.perf_counter() - start


def ours(arguments: argparse.Namespace) -> float:
    """Seconds of the command, which reads the texts from their file and writes an indexed data set."""
    from mindspeed_llm.tasks.preprocess.command.main import main

    start = time.perf_counter()
    main(command(arguments.input, arguments.tokenizer, arguments.output, arguments.workers))
    return time.perf_counter() - start


def command(source: str | Path, tokenizer: str | Path, output: str | Path, workers: int) -> list[str]:
    """The flags of the command."""
    return [
        "--input", str(source), "--tokenizer-name-or-path", str(tokenizer), "--output-prefix", str(output),
        "--workers", str(workers), "--overwrite-cache", "--log-interval", "1000000000",
    ]  # fmt: skip


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=("ours", "floor"), required=True)
    parser.add_argument("--input", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--workers", type=int, required=True)
    arguments = parser.parse_args()
    seconds = {"ours": ours, "floor": floor}[arguments.side](arguments)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
