"""The output folder: written under a temporary name, and published whole or not at all."""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import sync_folder
from mindspeed_llm.locks import FileLock, LockIsHeld
from mindspeed_llm.tasks.checkpoint.earlier import EarlierFile, changed, is_linked, stamps

# Any of these makes a folder a checkpoint for somebody.
_WEIGHTS = ("latest_checkpointed_iteration.txt", "iter_*", "release", "*.safetensors", "*.bin", "*.index.json")
_SPARE = 64 * 2**20
"""Free bytes to leave beside the tensors: headers, copied files, what else the disk's users write meanwhile."""
_SUFFIX = ".partial"
_LAST = ".unpublished_conversion"
"""Made first and removed last: only a folder that has it was left by a conversion, and may be removed."""
_LOCK_BEGINS = b"process "


class Staging:
    """A folder beside the output folder, which becomes it. A context manager: leaving removes what was not published.

    A kill leaves `<folder>.partial`, which nothing takes for a checkpoint and the next conversion removes. While one
    runs it holds a lock beside that folder, so that another one to the same place is refused and not mixed up with it.
    What has one of these names and was left by no conversion is never removed, written to or followed.
    """

    def __init__(
        self, folder: Path, *, nbytes: int, earlier: Mapping[str, EarlierFile] | None = None, workers: int = 1
    ) -> None:
        """
        Args:
            folder: the output folder; may exist, but hold no weights.
            nbytes: what will be written, to check free space before anything is.
            earlier: the files of an earlier conversion, which may be there and are replaced; None where that is not
                wanted. They are removed in this order: what says that they may be stands last.
            workers: threads that read them.

        Raises:
            UserError: it holds weights or changed files, cannot be made or written, is being written, or the disk is
                too full; what has a name that is needed beside it is not a conversion's.
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
        self._named = folder
        _refuse_weights(folder, self._target, earlier)
        if name := changed(self._target, self._earlier, workers=workers):
            raise _changed(folder, name)
        # The same look again before they are removed, hours later, must find what was read now.
        self._stamps = stamps(self._target, self._earlier)
        try:
            with contextlib.suppress(FileExistsError):  # a file: the lock's error says more
                self.folder.parent.mkdir(parents=True, exist_ok=True)
            _refuse_lock_of_others(self._lock.path, folder)
            _take(self._lock, folder, self.folder)
        except OSError as error:
            raise UserError(f"--save-dir {folder}: cannot be made there ({error.strerror}: {error.filename})") from None
        try:
            self._claim()
        except BaseException as error:
            self._unlock()
            if isinstance(error, OSError):
                raise UserError(
                    f"--save-dir {folder}: cannot be made there ({error.strerror}: {error.filename})"
                ) from None
            raise
        try:
            free = shutil.disk_usage(self.folder).free
            if free < nbytes + _SPARE:
                raise UserError(
                    f"--save-dir {folder}: {_size(nbytes)} will be written and {_size(_SPARE)} must stay free, but "
                    f"only {_size(free)} are free there; choose another disk or make room"
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
        """Move everything to the output folder, what is in `last` at the end. All files must be on the disk.

        Raises:
            UserError: a file that this conversion did not find, or found different, is in the way; nothing is moved.
        """
        for path in sorted(self.folder.rglob("*")):
            if path.is_dir():
                sync_folder(path)
        sync_folder(self.folder)
        in_place = self._target.exists() and any(self._target.iterdir())
        if in_place:
            self._refuse_to_replace()
            self._remove_earlier()
            for path in sorted(self.folder.iterdir()):
                if path != self.last:
                    os.replace(path, self._target / path.name)
            sync_folder(self._target)
        for path in sorted(self.last.iterdir()):
            os.replace(path, (self._target if in_place else self.folder) / path.name)
        if in_place:
            sync_folder(self._target)
        else:
            sync_folder(self.folder)
            # Renaming a folder over an empty one is one step. What marks it as a conversion's goes along: without it,
            # the next conversion after a kill would have to leave the folder alone.
            os.rename(self.folder, self._target)
            (self._target / _LAST).rmdir()
        sync_folder(self._target.parent)

    def _claim(self) -> None:
        """Make the folder, or empty what an earlier conversion left of it. The lock must be held."""
        try:
            self.folder.mkdir()
        except FileExistsError:
            # An empty folder is what a kill just after making it leaves, and nobody's loss.
            if (
                self.folder.is_symlink()
                or not self.folder.is_dir()
                or not (_is_marked(self.folder) or _is_empty(self.folder))
            ):
                raise UserError(
                    f"--save-dir {self._named} is written in {self.folder} first, which is there already and was not "
                    "left by a conversion; move it away, or choose another --save-dir"
                ) from None
            _empty(self.folder)
        self.last.mkdir()

    def _refuse_to_replace(self) -> None:
        """Refuse where a file would be replaced or removed that is not the one that was looked at in the beginning."""
        _refuse_weights(self._named, self._target, self._earlier)
        found = stamps(self._target, self._earlier)
        if names := sorted(name for name in found if found[name] != self._stamps.get(name)):
            raise _changed(self._named, names[0])
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.last if path.parent == self.last else self.folder)
            there = self._target / name
            if path.is_dir() or str(name) in found or not os.path.lexists(there):
                continue
            if is_linked(self._target, str(name)) or not there.is_file() or not filecmp.cmp(path, there, shallow=False):
                raise UserError(
                    f"--save-dir {self._named} holds {name}, which this conversion would replace with another one; "
                    "move it away, or choose another folder"
                )

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
        with contextlib.suppress(OSError):  # published, or a disk that takes nothing: the next conversion removes it
            if _is_marked(self.folder):
                _empty(self.folder)
                self.folder.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):  # a folder that has become read-only; the lock itself ends here
            self._lock.remove()
        self._lock.release()


def _refuse_weights(named: Path, folder: Path, earlier: Mapping[str, EarlierFile] | None) -> None:
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
            if not file.is_dir() and name not in earlier:
                raise _changed(named, name)


def _changed(named: Path, name: str) -> UserError:
    return UserError(
        f"--save-dir {named} holds {name}, which is not as a conversion left it: --overwrite leaves it alone; choose "
        "another folder, or remove it yourself"
    )


def _refuse_lock_of_others(path: Path, named: Path) -> None:
    """Taking a lock writes to its file."""
    if not os.path.lexists(path):
        return
    status = path.lstat()
    if stat.S_ISREG(status.st_mode):
        try:
            with path.open("rb") as file:
                begin = file.read(len(_LOCK_BEGINS))
        except FileNotFoundError:  # whoever held it has removed it just now
            return
        if begin in (b"", _LOCK_BEGINS):
            return
    raise UserError(
        f"--save-dir {named} needs the name {path} for its lock, which is there already and no lock of a conversion; "
        "move it away, or choose another --save-dir"
    )


def _take(lock: FileLock, named: Path, folder: Path) -> None:
    try:
        lock.take()
    except LockIsHeld as held:
        raise UserError(
            f"--save-dir {named} is being written by another conversion ({held.holder}), in {folder}; wait for its "
            "end, or choose another folder"
        ) from None


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def _is_marked(folder: Path) -> bool:
    mark = folder / _LAST
    return mark.is_dir() and not mark.is_symlink()


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def _empty(folder: Path) -> None:
    # The mark goes last: what a kill leaves of this must be known as a conversion's.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == _LAST):
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
