"""The output folder: written under a temporary name, and published whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType

from mindspeed_llm.errors import UserError

# Any of these makes a folder a checkpoint for somebody.
_WEIGHTS = ("latest_checkpointed_iteration.txt", "iter_*", "release", "*.safetensors", "*.bin", "*.index.json")
_SPARE = 64 * 2**20
"""Free bytes to leave beside the tensors: headers, copied files, what else the disk's users write meanwhile."""


class Staging:
    """A folder beside the output folder, which becomes it. A context manager: leaving removes what was not published.

    A kill leaves `<folder>.partial`, which nothing takes for a checkpoint and the next conversion removes.
    """

    def __init__(self, folder: Path, *, nbytes: int) -> None:
        """
        Args:
            folder: the output folder; may exist, but hold no weights.
            nbytes: what will be written, to check free space before anything is.

        Raises:
            UserError: it holds weights, cannot be made or written, or the disk is too full.
        """
        # A symlink is followed, so that a rename replaces what it points to and not the link.
        self._target = folder.resolve()
        self.folder = self._target.with_name(self._target.name + ".partial")
        if self._target.exists() and not self._target.is_dir():
            raise UserError(f"--save-dir {folder} is a file; expected a folder, or a name that does not exist")
        found = [path.name for pattern in _WEIGHTS for path in self._target.glob(pattern)]
        if found:
            raise UserError(
                f"--save-dir {folder} already holds {found[0]}; choose another folder, or remove what is in it"
            )
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        except OSError as error:
            raise UserError(f"--save-dir {folder}: cannot be made there ({error.strerror}: {error.filename})") from None
        free = shutil.disk_usage(self.folder).free
        if free < nbytes + _SPARE:
            self._remove()
            raise UserError(
                f"--save-dir {folder}: {nbytes / 1e9:.2f} GB will be written, but only {free / 1e9:.2f} GB are free "
                "there; choose another disk or make room"
            )

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def publish(self, last: str) -> None:
        """Move everything to the output folder; the entry `last`, without which nothing is loaded, comes last."""
        for path in sorted(self.folder.rglob("*")):
            if path.is_dir():
                _sync(path)
        _sync(self.folder)
        if self._target.exists() and any(self._target.iterdir()):
            for path in sorted(self.folder.iterdir(), key=lambda path: (path.name == last, path.name)):
                os.replace(path, self._target / path.name)
            _sync(self._target)
        else:
            # Renaming a folder over an empty one is one step.
            os.rename(self.folder, self._target)
        _sync(self._target.parent)

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file and push it to the disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
