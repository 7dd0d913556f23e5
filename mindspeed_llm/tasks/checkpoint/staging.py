"""The output folder: written under a temporary name, and published whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import sync_folder
from mindspeed_llm.locks import FileLock, LockIsHeld

# Any of these makes a folder a checkpoint for somebody.
_WEIGHTS = ("latest_checkpointed_iteration.txt", "iter_*", "release", "*.safetensors", "*.bin", "*.index.json")
_SPARE = 64 * 2**20
"""Free bytes to leave beside the tensors: headers, copied files, what else the disk's users write meanwhile."""
_SUFFIX = ".partial"
_LAST = ".last"


class Staging:
    """A folder beside the output folder, which becomes it. A context manager: leaving removes what was not published.

    A kill leaves `<folder>.partial`, which nothing takes for a checkpoint and the next conversion removes. While one
    runs it holds a lock beside that folder, so that another one to the same place is refused and not mixed up with it.
    """

    def __init__(self, folder: Path, *, nbytes: int, earlier: Mapping[str, int] | None = None) -> None:
        """
        Args:
            folder: the output folder; may exist, but hold no weights.
            nbytes: what will be written, to check free space before anything is.
            earlier: the files of an earlier conversion and their sizes, which may be there and are replaced; None
                where that is not wanted. They are removed in this order: what says that they may be stands last.

        Raises:
            UserError: it holds weights, cannot be made or written, is being written, or the disk is too full.
        """
        # A symlink is followed, so that a rename replaces what it points to and not the link.
        self._target = folder.resolve()
        self.folder = self._target.with_name(self._target.name + _SUFFIX)
        self.last = self.folder / _LAST
        """Where to put what makes the output a checkpoint: it comes to its place when all else is on the disk."""
        self._earlier = earlier or {}
        # Beside the folder, which is renamed with all that is in it.
        self._lock = FileLock(
            self.folder.with_name(f"{self.folder.name}.lock"),
            without_locks="do not start two conversions to one folder",
        )
        if self._target.exists() and not self._target.is_dir():
            raise UserError(f"--save-dir {folder} is a file; expected a folder, or a name that does not exist")
        _refuse_weights(folder, self._target, earlier)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _take(self._lock, folder, self.folder)
        except OSError as error:
            raise UserError(f"--save-dir {folder}: cannot be made there ({error.strerror}: {error.filename})") from None
        try:
            _empty(self.folder)
            self.last.mkdir()
            free = shutil.disk_usage(self.folder).free
            if free < nbytes + _SPARE:
                raise UserError(
                    f"--save-dir {folder}: {nbytes / 1e9:.2f} GB will be written, but only {free / 1e9:.2f} GB are "
                    "free there; choose another disk or make room"
                )
        except OSError as error:
            self._remove()
            raise UserError(f"--save-dir {folder}: cannot be written ({error.strerror}: {error.filename})") from None
        except BaseException:
            self._remove()
            raise

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def publish(self) -> None:
        """Move everything to the output folder, what is in `last` at the end. All files must be on the disk."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_dir():
                sync_folder(path)
        sync_folder(self.folder)
        in_place = self._target.exists() and any(self._target.iterdir())
        if in_place:
            self._remove_earlier()
            for path in sorted(self.folder.iterdir()):
                if path != self.last:
                    os.replace(path, self._target / path.name)
            sync_folder(self._target)
        for path in sorted(self.last.iterdir()):
            os.replace(path, (self._target if in_place else self.folder) / path.name)
        self.last.rmdir()
        if in_place:
            sync_folder(self._target)
        else:
            sync_folder(self.folder)
            # Renaming a folder over an empty one is one step.
            os.rename(self.folder, self._target)
        sync_folder(self._target.parent)

    def _remove_earlier(self) -> None:
        # What makes it a checkpoint goes first: nobody must find half of it.
        names = {path.name for path in self.last.iterdir()}
        for name in sorted(self._earlier, key=lambda name: name not in names):
            (self._target / name).unlink(missing_ok=True)
            if name in names:
                sync_folder(self._target)
            for parent in (self._target / name).parents:
                if parent == self._target:
                    break
                with contextlib.suppress(OSError):  # something else is in it, too
                    parent.rmdir()

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a folder that has become read-only; the lock itself ends here
            self._lock.remove()
        self._lock.release()


def _refuse_weights(named: Path, folder: Path, earlier: Mapping[str, int] | None) -> None:
    found = [path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))]
    if not found:
        return
    if earlier is None:
        raise UserError(
            f"--save-dir {named} already holds {found[0].name}; choose another folder, or remove what is in it, or "
            "give --overwrite to replace an earlier conversion"
        )
    for path in found:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = str(file.relative_to(folder))
            if not file.is_dir() and earlier.get(name) != file.stat().st_size:
                raise UserError(
                    f"--save-dir {named} holds {name}, which is not as a conversion left it: --overwrite leaves it "
                    "alone; choose another folder, or remove it yourself"
                )


def _take(lock: FileLock, named: Path, folder: Path) -> None:
    try:
        lock.take()
    except LockIsHeld as held:
        raise UserError(
            f"--save-dir {named} is being written by another conversion ({held.holder}), in {folder}; wait for its "
            "end, or choose another folder"
        ) from None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a small file and push it to the disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
