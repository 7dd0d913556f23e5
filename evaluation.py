"""Score a model on benchmarks.

    python evaluation.py --task mmlu gsm8k --task-data-path ./mmlu/test/ ./gsm8k/ --load CHECKPOINT [flags]
    torchrun --nproc_per_node 8 evaluation.py --task mmlu --task-data-path ./mmlu/test/ --load CHECKPOINT [flags]

`--help` lists all flags.
"""

import sys

from mindspeed_llm import cli


def main(argv: list[str]) -> int | None:
    """Evaluate as `argv` says; the import stands here so that its errors are reported like all others."""
    from mindspeed_llm.tasks.evaluation.main import main as evaluate

    return evaluate(argv)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
