"""Which files of a model's folder are its weights, and what tells them from others. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import hash_ends
from mindspeed_llm.tasks.checkpoint.weight_index import indexed_files

# (usual name, pattern of other names), in the order in which they are looked for.
LAYOUTS = (("model.safetensors", "*.safetensors"), ("pytorch_model.bin", "*.bin"), (None, "*.pt"))
_SAMPLE_BYTES, _NUM_SAMPLES = 256, 1024
_MOST_HEADER = 100_000_000
"""Of safetensors itself."""


def weight_files(folder: Path) -> list[Path]:
    """The files that the weights are read from: those of the index, else the one of the usual name, else all of a kind.

    Raises:
        UserError: there are none, or the index is damaged or names files that are missing.
    """
    for single, pattern in LAYOUTS:
        index = folder / f"{single}.index.json"
        if single and index.is_file():
            return indexed_files(index)
        # Alone where it exists: training_args.bin and the like may lie beside it.
        if single and (folder / single).is_file():
            return [folder / single]
        if found := sorted(folder.glob(pattern)):
            return found
    raise UserError(
        f"model.model_name_or_path: {folder} has no weights; expected model.safetensors(.index.json), *.safetensors, "
        "*.bin or *.pt (or set model.train_from_scratch: true)"
    )


def fingerprint(files: Iterable[Path]) -> str:
    """What tells weights from others of the same shapes, without reading them all: the xxh3-128, as hex, of each file's
    size, its ends, and the first bytes of each tensor, or of evenly spaced places where tensors cannot be told apart.

    An adapter that was merged into a model has changed every row of some tensors.
    """
    import xxhash

    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(f"{path.stat().st_size} {hash_ends(path)}\n".encode())
        with path.open("rb") as stream:
            for place in _tensor_places(stream) or _even_places(path.stat().st_size):
                stream.seek(place)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _tensor_places(stream: BinaryIO) -> list[int]:
    """Where the tensors of a safetensors file begin; empty where it is none."""
    size = int.from_bytes(stream.read(8), "little")
    if not 0 < size <= min(_MOST_HEADER, os.fstat(stream.fileno()).st_size):
        return []
    try:
        entries = json.loads(stream.read(size))
        starts = {int(entry["data_offsets"][0]) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return []
    return [8 + size + start for start in sorted(starts)]


def _even_places(size: int) -> list[int]:
    return [size * number // _NUM_SAMPLES for number in range(_NUM_SAMPLES)]
