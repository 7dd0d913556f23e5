"""Fine-tune a GPT model with the Megatron backend.

    python posttrain_gpt.py --stage sft [flags]
    torchrun --nproc_per_node 8 posttrain_gpt.py --stage sft [flags]

The flags are those of `pretrain_gpt.py` and the group "Fine-tuning" of `--help`. `--check` validates everything and
prints what each rank will hold, without training.
"""

import sys

from mindspeed_llm import cli


def main(argv: list[str]) -> int | None:
    """Train as `argv` says; the import stands here so that its errors are reported like all others."""
    from mindspeed_llm.tasks.posttrain.main import main as train

    return train(argv)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
