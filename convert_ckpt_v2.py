"""Convert weights between a Hugging Face model directory and a Megatron checkpoint.

    python convert_ckpt_v2.py --load-model-type hf --save-model-type mg --load-dir DIR --save-dir DIR \
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2
    python convert_ckpt_v2.py --load-model-type mg --save-model-type hf --load-dir DIR --save-dir DIR --hf-cfg-dir DIR

`--help` lists all flags.
"""

import sys

from mindspeed_llm import cli


def main(argv: list[str]) -> int | None:
    """Convert as `argv` says; the import stands here so that its errors are reported like all others."""
    from mindspeed_llm.tasks.checkpoint.main import main as convert

    return convert(argv)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
