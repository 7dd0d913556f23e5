"""What a checkpoint directory says about itself: its files with sizes and hashes, and where training stood.

    <output_dir>/checkpoints/
        latest                       name of the newest complete checkpoint
        global_step_20/
            manifest.json            written last but for the rename that publishes the directory
            .metadata                where each tensor's pieces lie (torch.distributed.checkpoint)
            __0_0.distcp ...         the pieces, one file per rank
            extra_state/extra_state_rank_0.pt ...   random state of each rank
        global_step_30.tmp/          a checkpoint that was never finished

A directory under its final name was complete when it was published. What happens to it later is found out by the
hashes. Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.checkpoints import files as lists
from mindspeed_llm.checkpoints.files import METADATA as METADATA
from mindspeed_llm.checkpoints.files import DamagedCheckpoint as DamagedCheckpoint
from mindspeed_llm.checkpoints.files import describe_file as describe_file
from mindspeed_llm.checkpoints.files import size_text as size_text
from mindspeed_llm.files import TEMPORARY_SUFFIX as TEMPORARY_SUFFIX

FOLDER = "checkpoints"
EXPORTS = "hf"
STEP_PREFIX = "global_step_"
LATEST = "latest"
FILE_NAME = "manifest.json"
EXTRA_STATE = "extra_state"
FORMAT = 1
# What the trainer needs to go on, in `Manifest.progress`.
PROGRESS = ("step", "samples", "tokens", "layouts", "loss_scaler", "interval")

_STEP_FOLDER = re.compile(rf"{STEP_PREFIX}(\d+)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of manifest.json.

    files: relative name -> {"size": bytes, "xxh3": hex digest}. topology: ranks, replicas, shards, micro batch size
    and accumulation of the run that wrote it. progress: what the trainer needs to go on. versions and config are for
    people. adapter: what the numbers of adapters mean, see `adapter_scale`, and under "base" which weights they are
    for, see `base_fingerprint`; None for a model. In the file a `checksum` follows: the xxh3-128 of its text up to
    there.
    """

    step: int
    has_optimizer: bool
    files: dict[str, dict[str, Any]]
    topology: dict[str, int]
    progress: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any]
    adapter: dict[str, Any] | None = None
    format: int = FORMAT


def checkpoints_folder(output_dir: Path) -> Path:
    """The folder of all checkpoints of a run."""
    return output_dir / FOLDER


def exports_folder(output_dir: Path) -> Path:
    """The folder of the Hugging Face exports that a run makes at its checkpoints."""
    return output_dir / EXPORTS


def step_name(step: int) -> str:
    """Directory name of the checkpoint after `step` optimizer steps."""
    return f"{STEP_PREFIX}{step}"


def find_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of all published checkpoints of a run, oldest first."""
    return steps_in(checkpoints_folder(output_dir))


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, directory) of all directories in `folder` that are called as a checkpoint is, lowest step first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP_FOLDER.fullmatch(path.name))]
    return sorted((step, path) for step, path in found if path.is_dir())


def read_latest(output_dir: Path) -> str | None:
    """Name of the checkpoint that the `latest` file points to, or None."""
    try:
        return (checkpoints_folder(output_dir) / LATEST).read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError):
        return None  # the pointer is a convenience for people; the directories themselves are what counts


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json and push it to the disk."""
    lists.write_sealed(folder / FILE_NAME, asdict(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        DamagedCheckpoint: it is missing, not as it was written, or not of this format.
    """
    path = folder / FILE_NAME
    try:
        manifest = Manifest(**lists.read_sealed(path))
    except TypeError as error:
        raise lists.unreadable(path, error) from error
    if manifest.format != FORMAT or not manifest.files:
        raise DamagedCheckpoint(f"{path}: format {manifest.format!r}, expected {FORMAT}, with a list of files")
    if problem := _wrong_value(manifest):
        raise DamagedCheckpoint(f"{path}: {problem}")
    return manifest


def _wrong_value(manifest: Manifest) -> str | None:
    """What no writer of this program would have put there, though the checksum fits."""
    if not isinstance(manifest.step, int) or not isinstance(manifest.has_optimizer, bool):
        return f"step {manifest.step!r} or has_optimizer {manifest.has_optimizer!r} is no such value"
    for name in ("files", "topology", "progress", "versions", "config"):
        if not isinstance(getattr(manifest, name), dict):
            return f"{name} is no mapping"
    if not isinstance(manifest.adapter, dict | None):
        return "adapter is no mapping"
    if not isinstance(manifest.topology.get("ranks"), int):
        return "topology names no number of ranks"
    if problem := lists.wrong_entry(manifest.files):
        return problem
    missing = [name for name in PROGRESS if name not in manifest.progress] if manifest.progress else []
    return f"progress lacks {', '.join(missing)}" if missing else None


def check_files(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None, *, with_hash: bool = True
) -> None:
    """Compare files (`names`, or all) with the manifest.

    Raises:
        DamagedCheckpoint: one is missing, of another size, or (with `with_hash`) of other content.
    """
    lists.check_files(folder, manifest.files, names, with_hash=with_hash)
