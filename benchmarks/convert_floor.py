"""The least that a conversion can cost: read a model with safetensors, write as many bytes, sync them.

Started by `benchmarks.convert`; prints the seconds from the first read to the last sync.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from safetensors.torch import load_file


def main() -> None:
    """Read, write, and print the seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--save-dir", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes of each file that is written")
    arguments = parser.parse_args()
    started = time.perf_counter()
    tensors = [tensor for path in sorted(arguments.model.glob("*.safetensors")) for tensor in load_file(path).values()]
    arguments.save_dir.mkdir(parents=True)
    left: list[memoryview] = []
    for number, size in enumerate(arguments.sizes):
        with (arguments.save_dir / f"{number}.bin").open("wb", buffering=0) as file:
            while size:
                left = left or [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in reversed(tensors)]
                values = left.pop()
                written = file.write(values[:size])
                size -= written
                if written < len(values):
                    left.append(values[written:])
            os.fsync(file.fileno())
    print(time.perf_counter() - started)


if __name__ == "__main__":
    main()
