"""Train a model with the FSDP2 backend.

    python train_fsdp2.py CONFIG.yaml [--section.field value ...]
    torchrun --nproc_per_node 8 train_fsdp2.py CONFIG.yaml [--section.field value ...]

`--help` lists all fields, `--check` validates everything without training.
"""

import sys

from mindspeed_llm import cli


def main(argv: list[str]) -> int | None:
    """Train as `argv` says; the import stands here so that its errors are reported like all others."""
    from mindspeed_llm.fsdp2.main import main as train

    return train(argv)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
