"""`train_fsdp2.py --list-checkpoints OUTPUT_DIR`: what is there, and whether it can be used. Needs no torch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint import manifest as layout
from mindspeed_llm.fsdp2.checkpoint.manifest import DamagedCheckpoint, Manifest
from mindspeed_llm.fsdp2.checkpoint.retention import set_aside_folders

_HEADINGS = ("step", "size", "age", "ranks", "contents", "state")
_WIDTHS = (8, 10, 8, 12, 16, 0)
_UNFINISHED_FOLDER = re.compile(rf"global_step_(\d+)(?:\..*)?{re.escape(layout.TEMPORARY_SUFFIX)}")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A directory of the listing. `problem` says what is wrong with it, and is None where it is whole; `manifest` is
    None where it cannot be read. `size` is what lies on the disk, in bytes; `modified` a time in seconds.
    """

    step: int
    folder: Path
    size: int
    modified: float
    manifest: Manifest | None
    problem: str | None
    is_finished: bool


def list_checkpoints(output_dir: Path, *, show: Callable[[str], object] = print) -> None:
    """Check every checkpoint of a run and show a table, newest first; each line as soon as its files are read.

    Raises:
        UserError: no checkpoints were ever written there.
    """
    folder = layout.checkpoints_folder(output_dir)
    if not folder.is_dir():
        raise UserError(f"--list-checkpoints: {_explain_missing(output_dir)}")
    show(f"{folder}\n" + _line(_HEADINGS))
    now, count, newest_whole = time.time(), 0, None
    for entry in read_entries(output_dir):
        count += 1
        is_latest = newest_whole is None and entry.is_finished and entry.problem is None
        if is_latest:
            newest_whole = entry
        show(_line(_cells(entry, now, is_latest)))
    if not count:
        show("(none)")
    pointer = layout.read_latest(output_dir)
    chosen = newest_whole.folder.name if newest_whole else None
    if pointer is not None and pointer != chosen:
        instead = f"takes {chosen}, the newest whole one" if chosen else "is not possible: no checkpoint is whole"
        show(f"{folder / layout.LATEST} names {pointer}, but resuming from latest {instead}")
    for path in set_aside_folders(output_dir):
        show(f"set aside: {path} with {', '.join(str(step) for step, _ in layout.steps_in(path))}")


def read_entries(output_dir: Path) -> Iterator[Entry]:
    """Checkpoints of a run from the newest to the oldest, each with its files compared to their hashes; then
    directories that were never finished, or are being written or removed at this moment.
    """
    for step, folder in reversed(layout.find_checkpoints(output_dir)):
        manifest, problem = None, None
        try:
            manifest = layout.read_manifest(folder)
            layout.check_files(folder, manifest)
        except DamagedCheckpoint as damage:
            problem = str(damage)
        yield _entry(step, folder, manifest, problem, is_finished=True)
    for step, folder in _find_unfinished(output_dir):
        yield _entry(step, folder, None, None, is_finished=False)


def _find_unfinished(output_dir: Path) -> list[tuple[int, Path]]:
    paths = layout.checkpoints_folder(output_dir).iterdir()
    return sorted((int(match[1]), path) for path in paths if (match := _UNFINISHED_FOLDER.fullmatch(path.name)))


def _entry(step: int, folder: Path, manifest: Manifest | None, problem: str | None, *, is_finished: bool) -> Entry:
    names = manifest.files if manifest else None
    size = 0
    for path in folder.rglob("*"):
        if names is None or str(path.relative_to(folder)) in names:
            size += _size(path)
    source = folder / layout.FILE_NAME
    modified = _modified(source if source.exists() else folder)
    return Entry(
        step=step,
        folder=folder,
        size=size,
        modified=modified,
        manifest=manifest,
        problem=problem,
        is_finished=is_finished,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0  # a run that is going on removes or renames it at this moment


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()  # as above


def _cells(entry: Entry, now: float, is_latest: bool) -> tuple[str, ...]:
    if not entry.is_finished:
        state = f"unfinished or being written: {entry.folder.name}"
    elif entry.problem is not None:
        state = f"damaged: {entry.problem}"
    else:
        state = "whole, latest" if is_latest else "whole"
    contents = "" if entry.manifest is None else "model, optimizer" if entry.manifest.has_optimizer else "model only"
    return (
        str(entry.step),
        layout.size_text(entry.size),
        _age(now - entry.modified),
        _topology(entry.manifest),
        contents,
        state,
    )


def _topology(manifest: Manifest | None) -> str:
    """Number of ranks, and for several replicas: (replicas x shards)."""
    if manifest is None:
        return ""
    topology = manifest.topology
    ranks, replicas, shards = (topology.get(name, "?") for name in ("ranks", "replicas", "shards"))
    return f"{ranks} ({replicas} x {shards})" if replicas != 1 else f"{ranks}"


def _line(cells: tuple[str, ...]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(cells[:3], _WIDTHS[:3], strict=True)]
    texts = [cell.ljust(width) for cell, width in zip(cells[3:], _WIDTHS[3:], strict=True)]
    return "  ".join([*numbers, *texts]).rstrip()


def _age(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _explain_missing(output_dir: Path) -> str:
    expected = f"expected the training.output_dir of a run, with a folder {layout.FOLDER} in it"
    if not output_dir.exists():
        return f"{output_dir} does not exist; {expected}"
    for parent in (output_dir.parent, output_dir.parent.parent):
        if layout.find_checkpoints(parent):
            return f"{output_dir} lies inside of the output folder of a run; give {parent}"
    return f"{output_dir} has no folder {layout.FOLDER}: no checkpoint has been written there; {expected}"
