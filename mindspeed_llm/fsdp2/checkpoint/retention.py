"""Which checkpoints and exports of a run's folder stay, which are removed, and which are set aside.

What belongs to another line of training, an earlier run in the same folder or steps beyond the one that a run went
back to, must neither be taken for `latest` nor be counted. It moves beside the folder, to the first number that is
free, and is never deleted:

    checkpoints/global_step_5    ->  checkpoints.1/global_step_5
    hf/global_step_5             ->  hf.1/global_step_5

Nothing here needs torch.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from mindspeed_llm.files import sync_folder, write_durably
from mindspeed_llm.fsdp2.checkpoint import manifest as layout
from mindspeed_llm.observability.log import get_logger

logger = get_logger(__name__)

_REPLACED = f".replaced{layout.TEMPORARY_SUFFIX}"
_REMOVED = f".removed{layout.TEMPORARY_SUFFIX}"
# What is being moved: where a crash cuts it off, the next start moves the rest.
_INTENTION = f".set_aside.json{layout.TEMPORARY_SUFFIX}"


def set_aside_all(output_dir: Path) -> None:
    """Move all checkpoints and exports of an earlier run aside, each folder as a whole. One log line says so.

    Raises:
        OSError: a folder cannot be moved.
    """
    # Exports first: after a crash in between, the next start gives the checkpoints the same number.
    folders = [layout.exports_folder(output_dir), layout.checkpoints_folder(output_dir)]
    folders = [folder for folder in folders if layout.steps_in(folder)]
    if not folders:
        return
    number = _free_number(folders)
    for folder in folders:
        home, target = Path(os.path.realpath(folder)), _beside(folder, number)
        if os.path.ismount(home):
            _move(folder, [step for step, _ in layout.steps_in(folder)], number)
            continue
        os.rename(home, target)
        # A link must not be left without a target, and others may look into the folder at this moment.
        home.mkdir()
        sync_folder(home.parent)
    logger.info(
        "An earlier run left %s in %s: set aside as %s",
        " and ".join("exports" if folder.name == layout.EXPORTS else "checkpoints" for folder in folders),
        output_dir,
        ", ".join(str(_beside(folder, number)) for folder in folders),
    )


def set_aside_steps(folder: Path, steps: Sequence[int]) -> None:
    """Move the directories of `steps` in `folder` aside: either all of them or, after a crash, the rest at the next
    start (`finish_interrupted`). One log line says so.

    Raises:
        OSError: a directory cannot be moved.
    """
    if not steps:
        return
    number = _free_number([folder])
    _move(folder, steps, number)
    logger.info(
        "%s of %s belong to another line of training than this run's: set aside in %s",
        ", ".join(layout.step_name(step) for step in steps),
        folder,
        _beside(folder, number),
    )


def replace(folder: Path, name: str, temporary: Path) -> None:
    """Publish `temporary` under `name` in `folder`. What has that name is set aside, and takes its place again where a
    crash leaves it without a successor.
    """
    final = folder / name
    if not final.exists():
        os.rename(temporary, final)
        sync_folder(folder)
        return
    outdated = final.with_name(name + _REPLACED)
    os.rename(final, outdated)
    os.rename(temporary, final)
    sync_folder(folder)
    _set_aside_replaced(outdated)


def finish_interrupted(folder: Path) -> None:
    """Bring a folder of checkpoints or exports in order after a crash: finish what was being moved, give a directory
    that was about to be replaced its place again, and remove what was never finished.
    """
    if not folder.is_dir():
        return
    intention = folder / _INTENTION
    try:
        content = json.loads(intention.read_text(encoding="utf-8"))
        _move(folder, content["steps"], content["number"])
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):
        intention.unlink()  # cut off by a power cut before anything was moved
    for path in [
        *folder.glob(f".{layout.LATEST}.*{layout.TEMPORARY_SUFFIX}"),
        *folder.glob(f".{_INTENTION}.*{layout.TEMPORARY_SUFFIX}"),
        *folder.glob(".shared_*"),
    ]:
        path.unlink(missing_ok=True)
    for path in folder.glob(f"{layout.STEP_PREFIX}*{_REPLACED}"):
        final = path.with_name(path.name.removesuffix(_REPLACED))
        if final.exists():
            _set_aside_replaced(path)
        else:
            os.rename(path, final)
    for path in folder.glob(f"{layout.STEP_PREFIX}*{layout.TEMPORARY_SUFFIX}"):
        what = "export" if folder.name == layout.EXPORTS else "checkpoint"
        logger.info("removed the unfinished %s %s", what, path)
        remove_folder(path)


def remove_oldest(folder: Path, limit: int | None, *, newest: int) -> None:
    """Remove the lowest steps in `folder` until `limit` are left (None: all); `newest` is never one of the victims.

    Raises:
        OSError: a directory cannot be removed.
    """
    if limit is None:
        return
    others = [path for step, path in layout.steps_in(folder) if step != newest]
    for path in others[: max(len(others) - (limit - 1), 0)]:
        remove_folder(path)


def remove_folder(path: Path) -> None:
    """Remove a directory so that a crash in between leaves none under its final name with files missing."""
    doomed = path
    if not path.name.endswith(layout.TEMPORARY_SUFFIX):
        doomed = path.with_name(path.name + _REMOVED)
        os.rename(path, doomed)
    shutil.rmtree(doomed)


def _set_aside_replaced(path: Path) -> None:
    target = _beside(path.parent, _free_number([path.parent])) / path.name.removesuffix(_REPLACED)
    target.parent.mkdir(exist_ok=True)
    os.rename(path, target)
    sync_folder(target.parent)
    logger.info("%s was replaced: the earlier one is set aside as %s", path.parent / target.name, target)


def _move(folder: Path, steps: Iterable[int], number: int) -> None:
    steps = list(steps)
    intention, target = folder / _INTENTION, _beside(folder, number)
    write_durably(intention, json.dumps({"steps": steps, "number": number}))
    target.mkdir(exist_ok=True)
    for step in steps:
        source = folder / layout.step_name(step)
        if source.exists():
            os.rename(source, target / source.name)
    sync_folder(target)
    sync_folder(folder)
    intention.unlink()
    # On the disk before anything else takes these names, or it would be moved after a power cut.
    sync_folder(folder)


def set_aside_folders(output_dir: Path) -> list[Path]:
    """Where checkpoints of other lines of training lie, by their numbers."""
    first = _beside(layout.checkpoints_folder(output_dir), 1)
    paths = first.parent.glob(f"{glob.escape(first.stem)}.*")
    found = [path for path in paths if path.suffix[1:].isdecimal() and layout.steps_in(path)]
    return sorted(found, key=lambda path: int(path.suffix[1:]))


def _beside(folder: Path, number: int) -> Path:
    """Where the contents of `folder` are set aside: beside it, on the same disk. A mounted disk has only its inside."""
    real = Path(os.path.realpath(folder))
    return (real if os.path.ismount(real) else real.parent) / f"{real.name}.{number}"


def _free_number(folders: Sequence[Path]) -> int:
    number = 1
    while any(_is_taken(_beside(folder, number)) for folder in folders):
        number += 1
    return number


def _is_taken(path: Path) -> bool:
    # A crash may have left an empty directory.
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))
