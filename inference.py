"""Ask a model of either backend.

    python inference.py --load DIR [flags]
    torchrun --nproc_per_node 8 inference.py --load DIR [flags]

DIR is a Hugging Face model, a PEFT adapter, or a checkpoint of the FSDP2 or the Megatron backend. `--task chat` talks,
`--prompt-file` with `--output-file` answers a file, `--serve` answers clients. `--help` lists all flags.
"""

import sys

from mindspeed_llm import cli


def main(argv: list[str]) -> int | None:
    """Answer as `argv` says; the import stands here so that its errors are reported like all others."""
    from mindspeed_llm.tasks.inference.main import main as infer

    return infer(argv)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
