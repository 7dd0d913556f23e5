"""Which steps and ranks are profiled: the `training.profile*` fields. What a profile is, the device decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindspeed_llm.observability.log import get_logger

_TO_THE_END = 2**40  # steps; more than any run has


class Profiler:
    """A context manager around the training loop; call `step` after each optimizer step.

    Steps are counted from 0 within this process, also in a resumed run: [profile_step_start, profile_step_end) with
    start 5 and end 6 records the sixth step that the process does. A step before the first recorded one warms up.
    """

    def __init__(
        self,
        make_profiler: Callable[..., Any],
        *,
        rank: int,
        profile: bool,
        profile_step_start: int = 0,
        profile_step_end: int = -1,
        profile_ranks: Sequence[int] = (-1,),
        profile_level: str = "level0",
        profile_export_type: str = "text",
        profile_data_simplification: bool = False,
        profile_with_cpu: bool = False,
        profile_with_stack: bool = False,
        profile_with_memory: bool = False,
        profile_record_shapes: bool = False,
        profile_save_path: str | Path = "./profile",
    ) -> None:
        """Args: make_profiler: the platform's constructor (`platform.profiling.make_profiler`); rank: global rank;
        the others as in the configuration (profile_step_end -1: to the end; profile_ranks -1: all ranks).

        Raises:
            ValueError: an empty or negative range of steps.
        """
        self._profiler: Any = None
        self._steps_done = 0
        self._first = profile_step_start
        self._save_path = Path(profile_save_path)
        if not profile or (-1 not in profile_ranks and rank not in profile_ranks):
            return
        if profile_step_start < 0 or (profile_step_end != -1 and profile_step_end <= profile_step_start):
            raise ValueError(
                f"profile_step_start={profile_step_start}, profile_step_end={profile_step_end}: the steps recorded are "
                "[start, end); start must be 0 or more, and end larger than start or -1"
            )
        warmup = min(profile_step_start, 1)
        self._profiler = make_profiler(
            skip_first=profile_step_start - warmup,
            warmup=warmup,
            active=(_TO_THE_END if profile_step_end == -1 else profile_step_end) - profile_step_start,
            level=profile_level,
            export_type=profile_export_type,
            data_simplification=profile_data_simplification,
            with_cpu=profile_with_cpu,
            with_stack=profile_with_stack,
            with_memory=profile_with_memory,
            record_shapes=profile_record_shapes,
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
            get_logger("profiler").info("profile written to %s", self._save_path)
        else:
            get_logger("profiler").warning(
                "no step was profiled: profile_step_start is %d, but this process did only %d steps (counted from 0)",
                self._first,
                self._steps_done,
            )
