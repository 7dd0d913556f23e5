"""`--load` with a Hugging Face directory: telling it from a folder of checkpoints."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.checkpointing.layout import TRACKER, iterations_in

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def hf_directory(args: Namespace) -> Path | None:
    """The folder of `--load` where it is a Hugging Face model directory, and None otherwise.

    Raises:
        UserError: it has a config.json and nothing to load, or is no Hugging Face directory where
            --enable-hf2mg-convert says so.
    """
    if args.load is None:
        return None
    folder = Path(args.load)
    has_config = (folder / "config.json").is_file()
    if has_config and any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        return folder
    if args.enable_hf2mg_convert:
        missing = f"weights ({' or '.join(_WEIGHTS)})" if has_config else "config.json"
        raise UserError(
            f"--load {folder}: --enable-hf2mg-convert expects a Hugging Face model directory, but there is no "
            f"{missing}; name another one, or leave --enable-hf2mg-convert out to go on from a checkpoint"
        )
    if has_config and not (folder / TRACKER).is_file() and not iterations_in(folder):
        raise UserError(
            f"--load {folder} has a config.json, but neither weights ({' or '.join(_WEIGHTS)}) nor a checkpoint; leave "
            "--load out to start from initial weights"
        )
    return None
