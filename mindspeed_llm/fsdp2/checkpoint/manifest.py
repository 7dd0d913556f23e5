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

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from mindspeed_llm.files import TEMPORARY_SUFFIX as TEMPORARY_SUFFIX
from mindspeed_llm.files import hash_file, write_durably

FOLDER = "checkpoints"
EXPORTS = "hf"
STEP_PREFIX = "global_step_"
LATEST = "latest"
FILE_NAME = "manifest.json"
METADATA = ".metadata"
EXTRA_STATE = "extra_state"
FORMAT = 1
# What the trainer needs to go on, in `Manifest.progress`.
PROGRESS = ("step", "samples", "tokens", "layouts", "loss_scaler", "interval")

_STEP_FOLDER = re.compile(rf"{STEP_PREFIX}(\d+)")
_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{32})"\n}\n\Z')


class DamagedCheckpoint(Exception):
    """A checkpoint that must not be loaded; the text names the file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of manifest.json.

    files: relative name -> {"size": bytes, "xxh3": hex digest}. topology: ranks, replicas, shards, micro batch size
    and accumulation of the run that wrote it. progress: what the trainer needs to go on. versions and config are for
    people. In the file a `checksum` follows: the xxh3-128 of its text up to there.
    """

    step: int
    has_optimizer: bool
    files: dict[str, dict[str, Any]]
    topology: dict[str, int]
    progress: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any]
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


def size_text(size: int) -> str:
    """A number of bytes for people."""
    if size >= 2**27:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.2f} MiB" if size >= 2**17 else f"{size / 2**10:.2f} KiB"


def read_latest(output_dir: Path) -> str | None:
    """Name of the checkpoint that the `latest` file points to, or None."""
    try:
        return (checkpoints_folder(output_dir) / LATEST).read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError):
        return None  # the pointer is a convenience for people; the directories themselves are what counts


def describe_file(path: Path) -> dict[str, Any]:
    """Size and hash of a file, as they stand in a manifest."""
    return {"size": path.stat().st_size, "xxh3": hash_file(path)}


def _hash_text(text: str) -> str:
    return xxhash.xxh3_128(text.encode("utf-8")).hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json and push it to the disk."""
    text = json.dumps(asdict(manifest), indent=1, ensure_ascii=False).removesuffix("\n}") + ",\n "
    write_durably(folder / FILE_NAME, f'{text}"checksum": "{_hash_text(text)}"\n}}\n')


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        DamagedCheckpoint: it is missing, not as it was written, or not of this format.
    """
    path = folder / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
        found = _CHECKSUM.search(text)
        if found is None or found[1] != _hash_text(text[: found.start()]):
            raise DamagedCheckpoint(f"{path} has other content than was written (its checksum differs)")
        content = json.loads(text)
        del content["checksum"]
        manifest = Manifest(**content)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except IsADirectoryError:
        raise DamagedCheckpoint(f"{path} is a directory, expected a file") from None
    except (OSError, ValueError, TypeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({type(error).__name__}: {error})") from error
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
    if not isinstance(manifest.topology.get("ranks"), int):
        return "topology names no number of ranks"
    for name, entry in manifest.files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{name} is not a file of this directory"
        if not isinstance(entry, dict) or entry.keys() != {"size", "xxh3"}:
            return f"{name} has no size and hash"
    missing = [name for name in PROGRESS if name not in manifest.progress] if manifest.progress else []
    return f"progress lacks {', '.join(missing)}" if missing else None


def check_file(folder: Path, manifest: Manifest, name: str, *, with_hash: bool = True) -> None:
    """Compare one file with the manifest.

    Raises:
        DamagedCheckpoint: it is missing, of another size, or (with `with_hash`) of other content.
    """
    path, expected = folder / name, manifest.files[name]
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is missing ({error.strerror})") from error
    if path.is_dir():
        raise DamagedCheckpoint(f"{path} is a directory, expected a file")
    if size != expected["size"]:
        raise DamagedCheckpoint(f"{path} has {size} bytes instead of {expected['size']}")
    try:
        same = not with_hash or hash_file(path) == expected["xxh3"]
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error
    if not same:
        raise DamagedCheckpoint(f"{path} has other content than was written (its hash differs)")


def check_files(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None, *, with_hash: bool = True
) -> None:
    """`check_file` for `names` (all files where None)."""
    for name in sorted(manifest.files) if names is None else names:
        check_file(folder, manifest, name, with_hash=with_hash)
