"""How a finished checkpoint takes its place in the folder, so that a kill at any moment leaves a folder in order.

The rename of its directory is what publishes a checkpoint; the tracker follows. A note that is written before says what
belongs to it, so that whoever comes next can finish what a kill cut off:

    note -> (a directory of that name goes aside) -> rename -> tracker -> foreign ones go aside -> note removed

Foreign are checkpoints of another line of training: of an earlier run in the same folder, or beyond the iteration that
this run went back to. They must neither be taken for older ones of this run nor be mixed with newer ones, and move to
`set_aside.<number>` inside the folder. Nothing here deletes a checkpoint, and nothing needs torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_llm.files import TEMPORARY_SUFFIX, sync_folder, write_durably
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.training.checkpointing.layout import (
    TRACKER,
    Tracker,
    iteration_name,
    iterations_in,
    read_tracker,
    unfinished_in,
)

logger = get_logger(__name__)
NOTE = ".publishing.json"
_ASIDE = "set_aside."


@dataclass(frozen=True, kw_only=True)
class _Note:
    """What is being done: `iteration` takes its place; `foreign`, which may contain it, go to `set_aside.<aside>`."""

    iteration: int
    foreign: tuple[int, ...]
    aside: int

    def is_published(self, folder: Path) -> bool:
        """Whether the directory under the final name is the new one."""
        if not (folder / iteration_name(self.iteration)).is_dir():
            return False
        return self.iteration not in self.foreign or self.target(folder, self.iteration).is_dir()

    def target(self, folder: Path, iteration: int) -> Path:
        """Where a foreign checkpoint goes."""
        return folder / f"{_ASIDE}{self.aside}" / iteration_name(iteration)


def publish(folder: Path, iteration: int, temporary: Path, *, last: int | None) -> None:
    """Give `temporary`, whose files are on the disk, the name of checkpoint `iteration`.

    Args:
        last: the iteration of this run's last checkpoint in `folder`; those beyond are foreign, and with None all.

    Raises:
        OSError: something cannot be written or moved.
    """
    foreign = tuple(found for found in iterations_in(folder) if last is None or found > last or found == iteration)
    note = _Note(iteration=iteration, foreign=foreign, aside=_free_number(folder))
    write_durably(folder / NOTE, json.dumps(asdict(note)))
    if iteration in foreign:
        _set_aside(folder, note, [iteration])
    os.rename(temporary, folder / iteration_name(iteration))
    sync_folder(folder)
    _complete(folder, note)


def is_left_unfinished(folder: Path) -> bool:
    """Whether a kill has left something for `finish_interrupted`, or a save is going on at this moment."""
    return folder.is_dir() and ((folder / NOTE).exists() or bool(unfinished_in(folder)))


def finish_interrupted(folder: Path) -> None:
    """Bring a folder in order after a kill: finish or undo what its note says, remove what was never finished."""
    if not folder.is_dir():
        return
    note = _read_note(folder)
    if note is not None:
        if note.is_published(folder):
            _complete(folder, note)
        else:
            moved = note.target(folder, note.iteration)
            if moved.is_dir():
                os.rename(moved, folder / iteration_name(note.iteration))
                sync_folder(folder)
            (folder / NOTE).unlink()
    for pattern in (f".{TRACKER}.*{TEMPORARY_SUFFIX}", f".{NOTE}.*{TEMPORARY_SUFFIX}", ".shared_*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    for path in unfinished_in(folder):
        logger.info("removed the unfinished checkpoint %s", path)
        shutil.rmtree(path)


@dataclass(frozen=True)
class Shelf:
    """The checkpoints of a folder as a reader must see them, also after a kill and before `finish_interrupted`."""

    tracker: Tracker
    iterations: tuple[int, ...]
    """Lowest first, without foreign ones."""


def look(folder: Path) -> Shelf:
    """What checkpoints there are; changes nothing."""
    tracker, found = read_tracker(folder), iterations_in(folder)
    note = _read_note(folder)
    if note is not None and note.is_published(folder):
        tracker = Tracker(note.iteration)
        found = [iteration for iteration in found if iteration == note.iteration or iteration not in note.foreign]
    return Shelf(tracker, tuple(found))


def _complete(folder: Path, note: _Note) -> None:
    write_durably(folder / TRACKER, str(note.iteration))
    others = [iteration for iteration in note.foreign if iteration != note.iteration]
    _set_aside(folder, note, others)
    if note.foreign:
        logger.info(
            "%s of %s belong to another line of training than this run's: set aside in %s",
            ", ".join(map(iteration_name, note.foreign)),
            folder,
            note.target(folder, 0).parent,
        )
    (folder / NOTE).unlink()
    sync_folder(folder)


def _set_aside(folder: Path, note: _Note, iterations: Sequence[int]) -> None:
    present = [number for number in iterations if (folder / iteration_name(number)).is_dir()]
    if not present:
        return
    target = note.target(folder, 0).parent
    target.mkdir(exist_ok=True)
    for number in present:
        os.rename(folder / iteration_name(number), note.target(folder, number))
    sync_folder(target)
    sync_folder(folder)


def _read_note(folder: Path) -> _Note | None:
    try:
        content = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        return _Note(
            iteration=int(content["iteration"]),
            foreign=tuple(int(number) for number in content["foreign"]),
            aside=int(content["aside"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not as it was written and is passed over (%s)", folder / NOTE, error)
        return None


def _free_number(folder: Path) -> int:
    number = 1
    while (folder / f"{_ASIDE}{number}").exists():
        number += 1
    return number
