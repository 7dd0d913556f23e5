"""What a run writes beside its metrics: the arguments that it came to, and the versions of what it ran with."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import yaml

from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.versions import write_versions
from mindspeed_llm.platform.device import device_name
from mindspeed_llm.training.arguments.parser import all_flags

FILE_NAME = "run_config.yaml"
# What validation works out, beside the flags.
_WORKED_OUT = ("padded_vocab_size", "data_parallel_size")


def write_run_files(folder: Path, args: Namespace) -> None:
    """Write run_config.yaml, the arguments by their names, and versions.json.

    Raises:
        UserError: the folder cannot be written.
    """
    names = dict.fromkeys((*(flag.dest for flag in all_flags().values()), *_WORKED_OUT))
    values = {name: _plain(getattr(args, name)) for name in names if hasattr(args, name)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
        write_versions(folder, device_name=device_name())
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error}); choose another --metrics-dir or --save") from error


def _plain(value: Any) -> Any:
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
