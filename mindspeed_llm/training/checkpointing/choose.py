"""Which checkpoint of a folder a run goes on from: the latest, or an older one where that is damaged."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.checkpoints.files import DamagedCheckpoint, check_files
from mindspeed_llm.checkpoints.storage import CheckpointError, Storage
from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.platform import distributed
from mindspeed_llm.training.checkpointing.layout import (
    RELEASE,
    TRACKER,
    format_of,
    iteration_name,
)
from mindspeed_llm.training.checkpointing.manifest import FILE_NAME, Manifest, read_manifest
from mindspeed_llm.training.checkpointing.publishing import Shelf, look

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A checkpoint whose files are as they were written, as far as that can be said."""

    folder: Path
    iteration: int | None
    """None: a release, which is no step of a run."""
    ckpt_format: str


def choose(args: Namespace, storage: Storage) -> Chosen | None:
    """The checkpoint of `args.load` to go on from (a collective); None where there is none at all.

    That is the one of `--ckpt-step`; else the one that the tracker names; else, where that is damaged, the newest whole
    one before it. What is passed over is reported with the file and what is wrong with it.

    Raises:
        UserError: the named step is missing, or there is no telling which is the latest.
        CheckpointError: the named one is damaged, or all are.
    """
    folder = Path(args.load)
    # One rank looks for all: a folder changes while other runs write to it.
    shelf: Shelf = storage.gather(look(folder) if distributed.rank() == 0 else None)[0]
    if args.ckpt_step is not None:
        return _the_one(folder, args.ckpt_step, shelf, storage)
    tracker = shelf.tracker
    if tracker.is_release:
        return _checked(folder / RELEASE, None, storage)
    if tracker.iteration is None:
        if not shelf.iterations:
            if tracker.problem is not None:
                raise CheckpointError(f"--load {folder}: {tracker.problem}, and there are no checkpoints")
            return None
        logger.warning(
            "%s; looking for the newest checkpoint instead", tracker.problem or f"{folder / TRACKER} is missing"
        )
        known = [number for number in shelf.iterations if (folder / iteration_name(number) / FILE_NAME).is_file()]
        if not storage.gather(known)[0]:
            raise UserError(
                f"--load {folder}: {tracker.problem or f'{TRACKER} is missing'}, and the checkpoints there have no "
                f"{FILE_NAME} that says whether they are whole; name one with --ckpt-step "
                f"({', '.join(map(str, shelf.iterations[-5:]))})"
            )
        candidates = storage.gather(known)[0]
    else:
        newest = tracker.iteration
        candidates = sorted({newest, *(number for number in shelf.iterations if number < newest)})
        if beyond := [number for number in shelf.iterations if number > newest]:
            logger.warning(
                "%s names step %d: %s, which lie beyond it, are not taken (--ckpt-step names one)",
                folder / TRACKER,
                newest,
                ", ".join(map(iteration_name, beyond)),
            )
    return _newest_whole(folder, candidates, storage)


def _the_one(folder: Path, step: int, shelf: Shelf, storage: Storage) -> Chosen:
    if step not in shelf.iterations:
        there = ", ".join(map(str, shelf.iterations[-5:])) or "none"
        raise UserError(f"--ckpt-step {step}: {folder} has no {iteration_name(step)}; there are: {there}")
    return _checked(folder / iteration_name(step), step, storage)


def _newest_whole(folder: Path, candidates: Iterable[int], storage: Storage) -> Chosen:
    passed_over = []
    for iteration in reversed(list(candidates)):
        path = folder / iteration_name(iteration)
        try:
            return _checked(path, iteration, storage)
        except CheckpointError as damage:
            passed_over.append(str(damage))
            logger.warning("skipped the damaged checkpoint %s: %s", path, damage)
    raise CheckpointError(f"--load {folder}: every checkpoint is damaged: {'; '.join(passed_over)}")


def _checked(folder: Path, iteration: int | None, storage: Storage) -> Chosen:
    """Compare the files with the manifest, each rank its part (a collective).

    Raises:
        CheckpointError: on all ranks, with the first problem.
    """
    manifest, problem = None, None
    try:
        if not folder.is_dir():
            raise DamagedCheckpoint(f"{folder} is missing")
        manifest = read_manifest(folder)
        if manifest is not None:
            if iteration is not None and manifest.iteration != iteration:
                raise DamagedCheckpoint(f"{folder} holds the checkpoint of step {manifest.iteration}")
            check_files(folder, manifest.files, _my_share(manifest, storage))
        elif format_of(folder) is None:
            raise DamagedCheckpoint(f"{folder} holds no checkpoint: neither rank files nor a distributed one")
    except DamagedCheckpoint as damage:
        problem = str(damage)
    found = [text for text in storage.gather(problem) if text is not None]
    if found:
        raise CheckpointError(found[0])
    if manifest is None:
        logger.info(
            "%s was written by another program: it has no %s, so that damage cannot be found out before it is read",
            folder,
            FILE_NAME,
        )
    name = manifest.ckpt_format if manifest is not None else format_of(folder)
    assert name is not None
    return Chosen(folder=folder, iteration=iteration, ckpt_format=name)


def _my_share(manifest: Manifest, storage: Storage) -> list[str]:
    names = sorted(manifest.files)
    if storage.shared:
        return names[distributed.rank() :: distributed.world_size()]
    return names if storage.is_leader else []
