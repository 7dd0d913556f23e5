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
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.config.model_files import INDEX

CONFIG = "config.json"
# What exports have beside a model or an adapter, the tokenizer's files by the names that transformers gives them.
_BESIDE = (
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_MOST_SHOWN = 4


def publish(staging: Path, folder: Path, *, last: str) -> None:
    """Move everything in `staging` to `folder`, after removing what loads of earlier exports there.

    An export replaces those of every kind: transformers adds an adapter to the weights that it finds beside it, whoever
    wrote them, and an earlier adapter's merged model would pass for that of the new one. Of that model nothing is left,
    not the tokenizer either. Files that no export writes stay.

    Several files cannot be exchanged in one step. `last`, without which no loader takes the folder for an export, goes
    first and comes back last, so that a kill in between never leaves a mixture of two exports that loads.
    """
    # The merged model first: that it is one is told by the adapter beside it.
    for place in replaced_by_export(folder):
        for stale in _what_loads(place):
            if not stale.is_dir():
                stale.unlink(missing_ok=True)
        if place != folder:
            _remove_beside(place)
    for path in sorted(staging.iterdir(), key=lambda path: (path.name == last, path.name)):
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)


def warn_of_replaced(config: Config) -> str | None:
    """The warning for a run whose export will take the place of a model or an adapter in its folder, or None."""
    training = config.training
    if not training.save_hf_weights:
        return None
    folder = Path(training.output_dir)
    places = replaced_by_export(folder)
    if config.model.has_adapters and training.merge_adapter and folder / MERGED not in places:
        places.append(folder / MERGED)
    found = [(path, place) for place in reversed(places) for path in _what_loads(place) if path.is_file()]
    if not found:
        return None
    names = ", ".join(str(path.relative_to(folder)) for path, _ in found[:_MOST_SHOWN])
    if len(found) > _MOST_SHOWN:
        names += f" and {len(found) - _MOST_SHOWN} more"
    return (
        f"training.output_dir = {training.output_dir!r} holds what an earlier run has exported, and the export of this "
        f"run will take its place: {names} will be removed. To keep it, stop this run and name another output_dir, or "
        "move it away"
    )


def _remove_beside(folder: Path) -> None:
    """Remove what an export has left in `folder` when nothing there loads any more, and the folder if it is empty."""
    for name in _BESIDE:
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def _what_loads(folder: Path) -> Iterator[Path]:
    """Configurations first: weights alone are nothing to a loader."""
    yield folder / CONFIG
    yield folder / ADAPTER_CONFIG
    yield folder / INDEX
    yield folder / ADAPTER_WEIGHTS
    yield from folder.glob("model*.safetensors")
