"""The hidden folder beside the output in which a run works, held by one run at a time.

`.<prefix>.preprocess` holds a lock, a note on what is being made, and the parts that are finished. What is in it is
never taken for output. The lock is the operating system's, so that it ends with the process that holds it, however that
ends; the next run with the same prefix clears away what was left, or goes on with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_llm.errors import UserError

_LOG = logging.getLogger("mindspeed_llm")
_NOTE = "work.json"


class Workspace:
    """A context manager; `folder` exists and belongs to this process inside of it.

    At its end the folder is removed, unless `keep` is true: then what is in it stays for the next run.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.folder = self.prefix.parent / f".{self.prefix.name}.preprocess"
        self.keep = False

    def __enter__(self) -> Workspace:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.keep:
                _LOG.warning("finished parts stay in %s; the same command goes on with them", self.folder)
            else:
                self._clear()
                (self.folder / "lock").unlink()
        finally:
            os.close(self._lock)
        if not self.keep:
            # After the lock is closed: until then network file systems keep a name for it in the folder. Another run
            # may have made itself a new lock there by now, and keeps the folder.
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _locked(self) -> int:
        while True:
            self.folder.mkdir(exist_ok=True)
            try:
                lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:
                # The run before has just removed the folder.
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 200, 0).decode(errors="replace") or "unknown"
                os.close(lock)
                raise UserError(
                    f"--output-prefix {self.prefix}: another run is writing it ({holder}); wait for its end, or choose "
                    "another prefix"
                ) from None
            except OSError as error:
                _LOG.warning("no locks in %s (%s): do not start two runs with one prefix", self.folder, error.strerror)
            if self._is_still_there(lock):
                break
            # The run that held it has removed it in the meantime.
            os.close(lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return lock

    def _is_still_there(self, lock: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self.folder / "lock"))
        except FileNotFoundError:
            return False

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
