"""The folders that a run reads from and writes to, looked at before anything heavy is done."""

from __future__ import annotations

import contextlib
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import why_unwritable
from mindspeed_llm.tasks.checkpoint.peft_config import CONFIG, WEIGHTS
from mindspeed_llm.training.checkpointing.layout import TRACKER, iterations_in

_WRITTEN = ("save", "metrics_dir", "tensorboard_dir", "data_cache_path", "hf_save_dir")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def check_folders(args: Namespace) -> None:
    """Check `--load` and the folders that are written to.

    Raises:
        UserError: a folder cannot be written to, or see `hf_directory` and `export_config`, or `--load` names nothing.
    """
    for name in _WRITTEN:
        folder = getattr(args, name)
        if folder is not None and (reason := why_unwritable(Path(folder))):
            raise UserError(f"--{name.replace('_', '-')} {folder} cannot be written: {reason}; name another folder")
    hf_directory(args)
    _check_adapters(args)
    _check_export(args)
    if args.load is None:
        return
    load = Path(args.load)
    if load.exists() and not load.is_dir():
        raise UserError(f"--load {load} is a file; name the folder of checkpoints, or of a Hugging Face model")
    # One command for the first start and for every restart has both flags alike.
    if not load.exists() and not (args.save is not None and Path(args.save).resolve() == load.resolve()):
        raise UserError(f"--load {load}: there is no such folder; leave --load out to start from initial weights")


def _check_adapters(args: Namespace) -> None:
    if args.lora_load is None:
        return
    folder = Path(args.lora_load)
    if args.load is None:
        raise UserError(f"--lora-load {folder} holds adapters for a model; name the model's folder with --load")
    if folder.resolve() == Path(args.load).resolve():
        raise UserError(f"--lora-load {folder} is the folder of --load; leave it out, or name the model's with --load")
    is_own = args.save is not None and Path(args.save).resolve() == folder.resolve()
    if not folder.is_dir() and not (is_own and not folder.exists()):
        raise UserError(
            f"--lora-load {folder}: expected a folder with checkpoints of a LoRA run, or with PEFT's files; leave it "
            "out to start with new adapters"
        )
    if (folder / WEIGHTS).is_file() and not (folder / CONFIG).is_file():
        raise UserError(f"--lora-load {folder} has {WEIGHTS}, but no {CONFIG} beside it; copy it there")


def _check_export(args: Namespace) -> None:
    if not args.save_lora_to_hf:
        return
    export_config(args)
    if args.hf_save_dir is not None and Path(args.hf_save_dir).resolve() == Path(args.save).resolve():
        raise UserError(
            f"--hf-save-dir {args.hf_save_dir} is the folder of --save, whose checkpoints have the same names; leave "
            "--hf-save-dir out, or name another folder"
        )


def export_config(args: Namespace) -> Path:
    """The folder of the Hugging Face model whose layers `--save-lora-to-hf` names.

    Raises:
        UserError: no flag says it, or it has no config.json.
    """
    named = (("--hf-cfg-dir", args.hf_cfg_dir), ("--load", hf_directory(args)), ("--model-from-hf", args.model_from_hf))
    flag, folder = next(((flag, Path(folder)) for flag, folder in named if folder is not None), ("", None))
    if folder is None:
        raise UserError(
            "--save-lora-to-hf names layers as the Hugging Face model does, and --load is no Hugging Face directory; "
            "give the folder with its config.json to --hf-cfg-dir"
        )
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{flag} {folder} has no config.json, by which --save-lora-to-hf names layers; name another one"
        )
    return folder


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


@contextlib.contextmanager
def in_words_of(given: Mapping[str, str]) -> Iterator[None]:
    """Let messages about what is loaded name the flags that the user has given.

    Args:
        given: a flag that a message may name -> the one that the user has given for it.

    Raises:
        UserError: the one raised inside, reworded.
    """
    try:
        yield
    except UserError as error:
        # A flag may be the end or the beginning of another one.
        flags = re.compile("|".join(rf"(?<![\w-]){re.escape(flag)}(?![\w-])" for flag in given))
        raise UserError(flags.sub(lambda found: given[found[0]], str(error))) from error
