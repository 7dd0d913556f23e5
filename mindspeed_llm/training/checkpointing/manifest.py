"""manifest.json: the files of a checkpoint with their sizes and hashes, beside what upstream's layout knows.

It is written when all other files are on the disk. What a run needs to go on stands in those, so that programs which do
not know the manifest can use them, and checkpoints that they write can be used here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.checkpoints.files import (
    DamagedCheckpoint,
    read_sealed,
    unreadable,
    write_sealed,
    wrong_entry,
)
from mindspeed_llm.training.checkpointing.layout import TORCH, TORCH_DIST

FILE_NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of manifest.json; a checksum of its own text follows them.

    files: relative name -> {"size": bytes, "xxh3": hex digest}. ranks and versions are for people.
    """

    iteration: int
    ckpt_format: str
    files: dict[str, dict[str, Any]]
    ranks: int
    versions: dict[str, str]
    format: int = FORMAT


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json and push it to the disk."""
    write_sealed(folder / FILE_NAME, asdict(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where it has none, because another program wrote it.

    Raises:
        DamagedCheckpoint: it is not as it was written, or not of this format.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        manifest = Manifest(**read_sealed(path))
    except TypeError as error:
        raise unreadable(path, error) from error
    if manifest.format != FORMAT or manifest.ckpt_format not in (TORCH, TORCH_DIST):
        raise DamagedCheckpoint(
            f"{path}: format {manifest.format!r} of {manifest.ckpt_format!r}, expected {FORMAT} of {TORCH} or "
            f"{TORCH_DIST}"
        )
    if not isinstance(manifest.files, dict) or not manifest.files or not isinstance(manifest.iteration, int):
        raise DamagedCheckpoint(f"{path} holds no list of files")
    if problem := wrong_entry(manifest.files):
        raise DamagedCheckpoint(f"{path}: {problem}")
    return manifest
