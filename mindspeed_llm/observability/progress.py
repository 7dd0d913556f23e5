"""A progress bar on a terminal; nothing where the output goes to a file, so that logs stay plain lines."""

from __future__ import annotations

import sys
from typing import Any

from mindspeed_llm.observability.log import redirect_lines


class ProgressBar:
    """Shows done and total steps, the rate and the loss. Log lines are printed above the bar while it is open."""

    def __init__(self, *, total_steps: int, start_step: int = 0, show: bool | None = None, unit: str = "step") -> None:
        """Args: total_steps and start_step in units, optimizer steps of a training; show None asks whether stderr is a
        terminal.
        """
        self._bar: Any = None
        if sys.stderr.isatty() if show is None else show:
            from tqdm import tqdm

            self._bar = tqdm(total=total_steps, initial=start_step, unit=unit, dynamic_ncols=True, file=sys.stderr)
            redirect_lines(lambda line: tqdm.write(line, file=sys.stdout))

    def update(self, step: int, *, loss: float | None = None) -> None:
        """Move the bar to `step` steps done."""
        if self._bar is not None:
            if loss is not None:
                self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it stands and give the terminal back; closing twice is allowed."""
        if self._bar is not None:
            redirect_lines(None)
            self._bar.close()
            self._bar = None
