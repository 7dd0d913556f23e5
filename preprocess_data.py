"""Turn files of records into token ids that both backends train on.

    python preprocess_data.py --input data.jsonl --output-prefix ./dataset/data --tokenizer-name-or-path ./my_model

`--help` lists all flags, `--check` validates everything without writing.
"""

import sys

from mindspeed_llm import cli


def main(argv: list[str]) -> int | None:
    """Preprocess as `argv` says; the import stands here so that its errors are reported like all others."""
    from mindspeed_llm.tasks.preprocess.command.main import main as preprocess

    return preprocess(argv)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
