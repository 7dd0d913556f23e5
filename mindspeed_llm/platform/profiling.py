"""Which steps and ranks are profiled: the `training.profile*` fields. What a profile holds, `profiler_backends` says.

It lives here and not in `observability`, because each device brings a profiler of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from mindspeed_llm.platform.profiler_backends import StepProfiler, make_profiler

_TO_THE_END = 2**40  # steps; more than any run has
_logger = logging.getLogger("mindspeed_llm.profiler")


class Profiler:
    """A context manager around the training loop; call `step` after each optimizer step.

    Steps are counted from 0 within this process, also in a resumed run: [step_start, step_end) with start 5 and end 6
    records the sixth step that the process does. The step before the first recorded one warms up.
    """

    def __init__(
        self,
        *,
        rank: int,
        enabled: bool,
        step_start: int = 0,
        step_end: int = -1,
        ranks: Sequence[int] = (-1,),
        level: str = "level0",
        export_type: str = "text",
        data_simplification: bool = False,
        with_cpu: bool = False,
        with_stack: bool = False,
        with_memory: bool = False,
        record_shapes: bool = False,
        save_path: str | Path = "./profile",
    ) -> None:
        """Prepare the profile; nothing runs and nothing is written when disabled or when the rank is not chosen.

        Args:
            rank: global rank of this process.
            enabled: `training.profile`; the others are the `training.profile_*` fields of the same name.
            step_start: first step recorded.
            step_end: first step no longer recorded; -1: record to the end.
            ranks: ranks that record; -1 stands for all.
            level: see `profiler_backends.make_profiler`, also for the remaining arguments.

        Raises:
            ValueError: an empty or negative range of steps, an unknown level or export type.
        """
        self._profiler: StepProfiler | None = None
        self._steps_done = 0
        self._first = step_start
        self._save_path = Path(save_path)
        if not enabled or (-1 not in ranks and rank not in ranks):
            return
        if step_start < 0 or (step_end != -1 and step_end <= step_start):
            raise ValueError(
                f"profile_step_start={step_start}, profile_step_end={step_end}: the steps recorded are "
                "[start, end); start must be 0 or more, and end larger than start or -1"
            )
        warmup = min(step_start, 1)
        self._profiler = make_profiler(
            skip_first=step_start - warmup,
            warmup=warmup,
            active=(_TO_THE_END if step_end == -1 else step_end) - step_start,
            level=level,
            export_type=export_type,
            data_simplification=data_simplification,
            with_cpu=with_cpu,
            with_stack=with_stack,
            with_memory=with_memory,
            record_shapes=record_shapes,
            save_path=self._save_path,
            rank=rank,
        )

    def __enter__(self) -> Profiler:
        if self._profiler is not None:
            self._profiler.start()
        return self

    def step(self) -> None:
        """Tell the profiler that an optimizer step has ended."""
        if self._profiler is not None:
            self._steps_done += 1
            self._profiler.step()

    def __exit__(self, *_: object) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        if self._steps_done > self._first:
            _logger.info("profile written to %s", self._save_path)
        else:
            _logger.warning(
                "no step was profiled: profile_step_start is %d, but this process did only %d steps (counted from 0)",
                self._first,
                self._steps_done,
            )
