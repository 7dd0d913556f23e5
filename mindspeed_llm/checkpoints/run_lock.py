"""One run at a time writes to an output folder."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from mindspeed_llm.errors import UserError
from mindspeed_llm.locks import FileLock, LockIsHeld
from mindspeed_llm.platform import distributed

FILE_NAME = ".run.lock"


@contextlib.contextmanager
def run_lock(folder: Path, setting: str) -> Iterator[None]:
    """Hold the lock of `folder`, which is made where it is missing (a collective). `setting` is what people call it.

    Rank 0 takes it, then the first rank of every other node: where that one finds the lock of its own run, the nodes
    see one folder; where nobody holds it, the node has a disk of its own.

    Raises:
        UserError: on all ranks; another run holds it, or the folder cannot be written.
    """
    group = distributed.new_host_group()
    names: list[str] = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0, group=group)
    lock = FileLock(
        folder / FILE_NAME, without_locks=f"nothing keeps a second run out; do not start two with one {setting}"
    )
    try:
        for leads in (distributed.rank() == 0, distributed.rank() != 0 and distributed.local_rank() == 0):
            problem = _take(lock, folder, setting, names[0]) if leads else None
            problems: list[str | None] = [None] * distributed.world_size()
            dist.all_gather_object(problems, problem, group=group)
            if found := [text for text in problems if text is not None]:
                raise UserError(found[0])
        yield
    finally:
        if lock.is_held:
            with contextlib.suppress(OSError):
                lock.remove()
            lock.release()


def _take(lock: FileLock, folder: Path, setting: str, run: str) -> str | None:
    """Take the lock; returns what stands against it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.take(run)
    except LockIsHeld as held:
        if held.note == run:
            return None
        return (
            f"{setting}: another run ({held.holder}) is writing to {folder}; wait for its end, or name another folder"
        )
    except OSError as error:
        return f"{setting}: cannot write to {folder} ({error}); choose another folder"
    return None
