"""TensorBoard events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER_NAME = "tensorboard"
# Progress counters are the x axis, not curves.
_NOT_CURVES = frozenset({"iteration", "consumed_samples"})


class TensorBoardWriter:
    """Writes each numeric value of a metrics object as a scalar of its iteration."""

    def __init__(self, folder: Path, *, start_iteration: int = 0) -> None:
        """Open the event file; a resumed run hides what an earlier one wrote after `start_iteration`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_iteration + 1 if start_iteration else None)

    def write(self, group: str, values: Mapping[str, Any]) -> None:
        """Write the numbers of `values`, which has an "iteration", under the tags `group/name`."""
        for name, value in values.items():
            if name not in _NOT_CURVES and isinstance(value, int | float):
                self._writer.add_scalar(f"{group}/{name}", value, global_step=values["iteration"])

    def flush(self) -> None:
        """Make what was written visible to a running TensorBoard."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
