"""One run at a time changes a folder of checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from mindspeed_llm.checkpoints.storage import Storage
from mindspeed_llm.errors import UserError
from mindspeed_llm.locks import FileLock, LockIsHeld

FILE_NAME = ".saving.lock"


@contextlib.contextmanager
def locked(folder: Path, storage: Storage) -> Iterator[None]:
    """Keep a second run out that saves in the same folder at this moment (a collective).

    Raises:
        UserError: on all ranks; another run is at it.
        CheckpointError: on all ranks; the folder cannot be written.
    """
    lock = FileLock(folder / FILE_NAME, without_locks="do not let two runs save in one folder")

    def take() -> None:
        try:
            lock.take()
        except LockIsHeld as held:
            raise UserError(
                f"--save {folder}: another run ({held.holder}) is saving there; name another folder for one of the two"
            ) from None

    try:
        storage.leaders_only(f"locking {folder}", take)
        yield
    finally:
        if lock.is_held:
            with contextlib.suppress(OSError):  # a folder that has become read-only; the lock itself ends here
                lock.remove()
            lock.release()
