"""Turn a checkpoint into a Hugging Face model directory, on one machine without accelerators.

    python -m mindspeed_llm.fsdp2.checkpoint.merge_dcp_to_hf --load-dir OUTPUT/checkpoints/global_step_N

Tensors are read and written one at a time, so memory does not grow with the model.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from mindspeed_llm import cli
from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint import manifest as layout
from mindspeed_llm.fsdp2.checkpoint.manifest import DamagedCheckpoint, Manifest
from mindspeed_llm.observability.log import get_logger, setup_logging

logger = get_logger(__name__)

_DEFAULT_NAME = "hf_ckpt"
PROGRAM = "python -m mindspeed_llm.fsdp2.checkpoint.merge_dcp_to_hf"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Turn a checkpoint of a training run into a Hugging Face model directory."
    )
    parser.add_argument(
        "--load-dir", type=Path, required=True, help="the checkpoint: <output_dir>/checkpoints/global_step_N"
    )
    parser.add_argument("--save-dir", type=Path, help="where to write (default: LOAD_DIR/hf_ckpt)")
    parser.add_argument(
        "--model-configs",
        type=Path,
        help="directory with config.json and tokenizer (default: the model that the run was started from); of its "
        "weights only names and types are read",
    )
    parser.add_argument(
        "--shard-size",
        type=_whole_number,
        default=5_000_000_000,
        help="largest size of one weight file in bytes, such as 5000000000 or 5e9 (default)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="type of the weights (default: training.hf_export_dtype of the run, else that of the source model)",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")
    parser.add_argument("--debug", action="store_true", help="show tracebacks (as MINDSPEED_DEBUG=1)")
    return parser


def _whole_number(text: str) -> int:
    try:
        number = float(text)
        if number.is_integer():
            return int(text) if text.lstrip("+-").isdecimal() else int(number)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number of bytes, such as 5000000000 or 5e9")


def main(argv: list[str]) -> int:
    """Check the checkpoint, then convert it; returns the exit code.

    Raises:
        UserError: the directory is no whole checkpoint, does not fit the model, or the result cannot be written.
    """
    options = _parser().parse_args(argv)
    setup_logging()
    if options.shard_size <= 0:
        raise UserError(f"--shard-size: {options.shard_size}; expected a number of bytes above 0")
    try:
        save_dir = options.save_dir or options.load_dir / _DEFAULT_NAME
        _check_save_dir(save_dir, options.load_dir)
        manifest = _checked_manifest(options.load_dir)
        from mindspeed_llm.fsdp2.checkpoint.dcp_to_hf import convert

        convert(
            options.load_dir,
            manifest,
            save_dir,
            model_configs=options.model_configs,
            shard_size=options.shard_size,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
        )
    except DamagedCheckpoint as damage:
        raise UserError(f"--load-dir: {damage}") from damage
    return 0


def _check_save_dir(save_dir: Path, load_dir: Path) -> None:
    """Refuse a folder of a checkpoint's own files; only `hf_ckpt` in it is free."""
    target = save_dir.resolve()
    if target.exists() and not target.is_dir():
        raise UserError(f"--save-dir: {save_dir} is a file; name a folder")
    for folder in (target, *target.parents):
        is_checkpoint = folder == load_dir.resolve() or (folder / layout.FILE_NAME).exists()
        if is_checkpoint and (folder / _DEFAULT_NAME) not in (target, *target.parents):
            raise UserError(
                f"--save-dir: {save_dir} {'is' if folder == target else 'lies in'} the checkpoint {folder}; name a "
                f"folder outside of it, or leave --save-dir out for {load_dir / _DEFAULT_NAME}"
            )


def _checked_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all as they were written."""
    if not folder.is_dir():
        raise UserError(f"--load-dir: {folder} is no directory; expected <output_dir>/checkpoints/global_step_N")
    if not (folder / layout.FILE_NAME).exists():
        for output_dir in (folder, folder.parent):
            if found := layout.find_checkpoints(output_dir):
                raise UserError(
                    f"--load-dir: {folder} is no checkpoint; checkpoints of this run: "
                    + ", ".join(str(path) for _, path in found)
                )
        raise UserError(
            f"--load-dir: {folder} is no checkpoint, or one that was never finished: it has no {layout.FILE_NAME}; "
            "expected <output_dir>/checkpoints/global_step_N"
        )
    manifest = layout.read_manifest(folder)
    size = sum(entry["size"] for entry in manifest.files.values())
    started = time.monotonic()
    logger.info("Checking %d files of %s (%s)", len(manifest.files), folder, layout.size_text(size))
    layout.check_files(folder, manifest)
    logger.info("All as they were written after step %d (%.1f s)", manifest.step, time.monotonic() - started)
    return manifest


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
