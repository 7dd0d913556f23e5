"""Putting a finished export into its folder, in the place of an earlier one. Needs no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mindspeed_llm.fsdp2.config.adapter_files import CONFIG as ADAPTER_CONFIG
from mindspeed_llm.fsdp2.config.adapter_files import MERGED as MERGED
from mindspeed_llm.fsdp2.config.adapter_files import WEIGHTS as ADAPTER_WEIGHTS
from mindspeed_llm.fsdp2.config.adapter_files import replaced_by_export
from mindspeed_llm.fsdp2.config.model_files import INDEX

CONFIG = "config.json"


def publish(staging: Path, folder: Path, *, last: str) -> None:
    """Move everything in `staging` to `folder`, after removing what loads of earlier exports there.

    An export replaces those of every kind: transformers adds an adapter to the weights that it finds beside it, whoever
    wrote them, and an earlier adapter's merged model would pass for that of the new one. Files that no export writes
    stay.

    Several files cannot be exchanged in one step. `last`, without which no loader takes the folder for an export, goes
    first and comes back last, so that a kill in between never leaves a mixture of two exports that loads.
    """
    # The merged model first: that it is one is told by the adapter beside it.
    for place in replaced_by_export(folder):
        for stale in _what_loads(place):
            stale.unlink(missing_ok=True)
    for path in sorted(staging.iterdir(), key=lambda path: (path.name == last, path.name)):
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)


def _what_loads(folder: Path) -> Iterator[Path]:
    """Configurations first: weights alone are nothing to a loader."""
    yield folder / CONFIG
    yield folder / ADAPTER_CONFIG
    yield folder / INDEX
    yield folder / ADAPTER_WEIGHTS
    yield from folder.glob("model*.safetensors")
