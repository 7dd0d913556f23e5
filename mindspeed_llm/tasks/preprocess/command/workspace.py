"""The hidden folder beside the output in which a run works, held by one run at a time.

`.<prefix>.preprocess` holds a lock, a note on what is being made, and the parts that are finished. What is in it is
never taken for output. The lock is the operating system's, so that it ends with the process that holds it, however that
ends; the next run with the same prefix clears away what was left, or goes on with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.locks import FileLock, LockIsHeld

_LOG = logging.getLogger("mindspeed_llm")
_NOTE = "work.json"


def workspace_folder(prefix: Path) -> Path:
    """The hidden folder of a prefix."""
    return prefix.parent / f".{prefix.name}.preprocess"


class Workspace:
    """A context manager; `folder` exists and belongs to this process inside of it.

    At its end the folder is removed, unless `keep` is true: then what is in it stays for the next run.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.folder = workspace_folder(self.prefix)
        self.keep = False
        self._lock = FileLock(self.folder / "lock", without_locks="do not start two runs with one prefix")

    def __enter__(self) -> Workspace:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.keep:
                _LOG.warning("finished parts stay in %s; the same command goes on with them", self.folder)
            else:
                self._clear()
                self._lock.remove()
        finally:
            self._lock.release()
        if not self.keep:
            # After the lock is closed: until then network file systems keep a name for it in the folder. Another run
            # may have made itself a new lock there by now, and keeps the folder.
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _take_lock(self) -> None:
        while True:
            self.folder.mkdir(exist_ok=True)
            try:
                self._lock.take()
                return
            except FileNotFoundError:
                # The run before has just removed the folder.
                continue
            except LockIsHeld as held:
                raise UserError(
                    f"--output-prefix {self.prefix}: another run is writing it ({held.holder}); wait for its end, or "
                    "choose another prefix"
                ) from None

    def clear_leftovers(self) -> None:
        """Remove what a run that has ended left here, unless another run is at work."""
        if not self.folder.is_dir():
            return
        try:
            with self:
                _LOG.info("removing %s, which an earlier run left", self.folder)
        except OSError as error:
            _LOG.warning("%s, which an earlier run left, cannot be removed (%s)", self.folder, error.strerror)
        except UserError:
            _LOG.info("%s is of another run, which is at work", self.folder)

    def note(self) -> dict[str, Any]:
        """What an earlier run was making here, by its own words; empty where there was none or it is unreadable."""
        try:
            return json.loads((self.folder / _NOTE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def begin(self, note: Mapping[str, Any]) -> None:
        """Clear away everything that an earlier run has left, and note what this one makes."""
        self._clear()
        write_json(self.folder / _NOTE, note)

    def _clear(self) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file so that it is there as a whole or not at all. Only for files inside of a workspace."""
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2, ensure_ascii=False)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)
