"""Prepared data on disk: keys that change with anything that changes the result, and building once for many ranks."""

import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_llm.errors import UserError
from mindspeed_llm.platform import distributed
from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary
from mindspeed_llm.tasks.preprocess.sample_store import read_summary, store_exists, write_store

_LOG = logging.getLogger("mindspeed_llm")

_FORMAT_VERSION = 3
_HASHED_BYTES = 1 << 20
_POLL_SECONDS = 0.05
_FAILURE_SECONDS = 10.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


def cache_key(**parts: Any) -> str:
    """A short hash of everything that decides the prepared data."""
    text = json.dumps({"version": _FORMAT_VERSION, **parts}, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_identity(file: Path) -> list[Any]:
    """What tells a file from an earlier one of its name: path, size, time of change, and a hash of its first MB."""
    status = file.stat()
    with file.open("rb") as stream:
        digest = hashlib.sha256(stream.read(_HASHED_BYTES)).hexdigest()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns, digest]


def files_identity(files: Iterable[Path]) -> list[list[Any]]:
    """`file_identity` of each file."""
    return [file_identity(file) for file in files]


def stored(
    prefix: Path,
    keys: tuple[str, ...],
    chunks: Callable[[Summary], Iterable[Chunk]],
    *,
    one_per_node: bool,
    overwrite: bool = False,
    storage_flag: str,
    folder_flag: str,
    purpose: str = "train",
) -> None:
    """Write the sample store `prefix` once, unless it exists; a store that is used again is reported as it was made.

    Every process of a job must call this, see `build_once`. `purpose` (train or evaluate) is for the message where no
    sample is left, `folder_flag` (what chooses the folder) for the one where the folder cannot be written; both are
    UserErrors.
    """
    built = False

    def build() -> None:
        nonlocal built
        built, summary = True, Summary()
        try:
            write_store(prefix, keys, chunks(summary), summary, purpose=purpose)
        except OSError as error:
            is_below = error.filename is not None and Path(error.filename).is_relative_to(prefix.parent)
            if not is_below and error.errno not in _FULL:
                raise
            raise UserError(
                f"prepared data cannot be written to {prefix.parent} ({error.strerror}); free some space there, or "
                f"choose another folder with {folder_flag}"
            ) from error

    build_once(
        lambda: store_exists(prefix),
        build,
        one_per_node=one_per_node,
        overwrite=overwrite,
        storage_flag=storage_flag,
    )
    if not built:
        summary = read_summary(prefix)
        _LOG.info("using %s: %d records, %d samples", prefix, summary.num_records, summary.num_samples)
        for line in (*summary.skip_lines(), *summary.notes()):
            _LOG.info("%s: %s", prefix.name, line)


def build_once(
    exists: Callable[[], bool],
    build: Callable[[], None],
    *,
    one_per_node: bool,
    overwrite: bool = False,
    storage_flag: str,
) -> None:
    """Run `build` on one rank (of the job, or of each node) unless its result exists; the others wait.

    `storage_flag` is for the message where a rank does not see what was built: what to set where nodes share no disk.
    Waiting goes through the process group's store and has no time limit, since tokenizing may take longer than a
    collective may. A failure of the builder is raised on all ranks. Every rank must call this the same number of times.
    """
    builder = distributed.local_rank() == 0 if one_per_node else distributed.is_rank_zero()
    if not dist.is_initialized() or distributed.world_size() == 1:
        if overwrite or not exists():
            build()
        return
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"mindspeed_llm/data/calls/{distributed.rank()}", 1)
    node = distributed.rank() - distributed.local_rank() if one_per_node else 0
    key = f"mindspeed_llm/data/{number}/{node}"
    if builder:
        try:
            if overwrite or not exists():
                build()
        except BaseException as error:
            store.set(key, f"{'user' if isinstance(error, UserError) else 'other'}:{error}")
            _wait_until_told(store, key, one_per_node)
            raise
        store.set(key, "done:")
        return
    while not store.check([key]):
        time.sleep(_POLL_SECONDS)
    kind, _, text = store.get(key).decode().partition(":")
    store.add(f"{key}/told", 1)
    if kind == "user":
        raise UserError(text)
    if kind == "other":
        raise RuntimeError(f"preparing the data failed on another rank: {text}")
    if not exists():
        raise UserError(
            f"prepared data of rank 0 cannot be seen from this node; where nodes share no storage set {storage_flag}"
        )


def _wait_until_told(store: dist.Store, key: str, one_per_node: bool) -> None:
    """Give the others a moment to read the failure: the store may live in this process, which is about to end."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if one_per_node else distributed.world_size()
    deadline = time.monotonic() + _FAILURE_SECONDS
    while store.add(f"{key}/told", 0) < ranks - 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
