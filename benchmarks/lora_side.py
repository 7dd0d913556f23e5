"""One contestant of `benchmarks.lora_step`, in a process of its own: a step for each line of its input.

Before each step it prints the loss of the one before and the largest resident memory so far, as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import lora_sides
from mindspeed_llm.platform import memory


def main() -> None:
    """Train until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=list(lora_sides.SIDES), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="what `lora_sides.make_inputs` has written")
    parser.add_argument("--sequence", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    lora_sides.SIDES[arguments.side](
        arguments.model, arguments.folder, sequence=arguments.sequence, steps=arguments.steps, turn=_turn
    )


def _turn(loss: float | None) -> None:
    print(json.dumps({"loss": loss, "peak_gb": memory.max_memory_allocated_gb()}), flush=True)
    if not sys.stdin.readline():
        sys.exit()


if __name__ == "__main__":
    main()
