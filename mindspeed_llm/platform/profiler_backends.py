"""The profiler of each device behind one constructor.

Written files, below `save_path`:
- npu: what torch_npu's trace handler writes, `rank<r>_..._ascend_pt/`;
- other devices, text: `rank<r>.pt.trace.json` (Chrome, Perfetto, TensorBoard) and `rank<r>.operators.txt`;
- other devices, db: `rank<r>.db`, SQLite with the tables `events` and `operators`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mindspeed_llm.platform.device import device_type

LEVELS = ("level_none", "level0", "level1", "level2")
EXPORT_TYPES = ("text", "db")


class StepProfiler(Protocol):
    """What the trainer's loop drives: start before the first step, step after each, stop at the end."""

    def start(self) -> None: ...

    def step(self) -> None: ...

    def stop(self) -> None: ...


def make_profiler(
    *,
    skip_first: int,
    warmup: int,
    active: int,
    level: str,
    export_type: str,
    data_simplification: bool,
    with_cpu: bool,
    with_stack: bool,
    with_memory: bool,
    record_shapes: bool,
    save_path: Path,
    rank: int,
) -> StepProfiler:
    """A profiler that skips `skip_first` steps, warms up for `warmup` and records `active` steps, once.

    Args:
        level: how much device activity is recorded. npu: the library's level of that name. Other devices: level_none
            records the host's operators only, level0 adds device kernels, level1 and level2 add the FLOPs of each
            matrix product.
        export_type: "text" or "db".
        data_simplification: leave out what can be derived: npu: the raw data after its analysis; other devices: the
            summary by operator beside the trace.
        with_cpu: record the host too (on cpu, and at level_none, the host is all there is and is always recorded).
        with_stack: record Python stacks.
        with_memory: record allocations.
        record_shapes: record the shapes of the operators' inputs.
        save_path: folder for the results.
        rank: global rank, part of the file names.

    Raises:
        ValueError: an unknown level or export type.
    """
    if level not in LEVELS:
        raise ValueError(f"profile level {level!r}: expected one of {', '.join(LEVELS)}")
    if export_type not in EXPORT_TYPES:
        raise ValueError(f"profile export type {export_type!r}: expected one of {', '.join(EXPORT_TYPES)}")
    save_path.mkdir(parents=True, exist_ok=True)
    make = _make_npu_profiler if device_type() == "npu" else _make_torch_profiler
    return make(
        skip_first=skip_first,
        warmup=warmup,
        active=active,
        level=level,
        export_type=export_type,
        data_simplification=data_simplification,
        with_cpu=with_cpu,
        record_options={"with_stack": with_stack, "profile_memory": with_memory, "record_shapes": record_shapes},
        save_path=save_path,
        rank=rank,
    )


def _make_npu_profiler(
    *,
    skip_first: int,
    warmup: int,
    active: int,
    level: str,
    export_type: str,
    data_simplification: bool,
    with_cpu: bool,
    record_options: dict[str, Any],
    save_path: Path,
    rank: int,
) -> StepProfiler:
    import torch_npu

    profiler = torch_npu.profiler
    levels = {
        "level_none": profiler.ProfilerLevel.Level_none,
        "level0": profiler.ProfilerLevel.Level0,
        "level1": profiler.ProfilerLevel.Level1,
        "level2": profiler.ProfilerLevel.Level2,
    }
    exports = {"text": profiler.ExportType.Text, "db": profiler.ExportType.Db}
    activities = [profiler.ProfilerActivity.NPU]
    if with_cpu or level == "level_none":
        activities.append(profiler.ProfilerActivity.CPU)
    return profiler.profile(
        activities=activities,
        # This schedule takes wait, active, warmup in that order, torch's another: hence only keywords.
        schedule=profiler.schedule(wait=0, active=active, warmup=warmup, repeat=1, skip_first=skip_first),
        on_trace_ready=profiler.tensorboard_trace_handler(str(save_path), worker_name=f"rank{rank}"),
        experimental_config=profiler._ExperimentalConfig(
            profiler_level=levels[level],
            data_simplification=data_simplification,
            export_type=exports[export_type],
        ),
        **record_options,
    )


def _make_torch_profiler(
    *,
    skip_first: int,
    warmup: int,
    active: int,
    level: str,
    export_type: str,
    data_simplification: bool,
    with_cpu: bool,
    record_options: dict[str, Any],
    save_path: Path,
    rank: int,
) -> StepProfiler:
    from torch import profiler

    activities = []
    if device_type() == "cuda" and level != "level_none":
        activities.append(profiler.ProfilerActivity.CUDA)
    if with_cpu or not activities:
        activities.append(profiler.ProfilerActivity.CPU)
    writers: dict[str, Callable[[Any, Path, bool], None]] = {"text": _write_text, "db": _write_database}
    return profiler.profile(
        activities=activities,
        schedule=profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1, skip_first=skip_first),
        on_trace_ready=lambda done: writers[export_type](done, save_path / f"rank{rank}", not data_simplification),
        with_flops=level in ("level1", "level2"),
        **record_options,
    )


def _write_text(profile: Any, stem: Path, with_summary: bool) -> None:
    profile.export_chrome_trace(f"{stem}.pt.trace.json")
    if with_summary:
        table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=-1)
        Path(f"{stem}.operators.txt").write_text(table, encoding="utf-8")


def _write_database(profile: Any, stem: Path, with_summary: bool) -> None:
    path = Path(f"{stem}.db")
    path.unlink(missing_ok=True)  # of an earlier run: tables of two runs must not mix
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(
            "CREATE TABLE events (name TEXT, device TEXT, thread INTEGER, start_us REAL, duration_us REAL, "
            "input_shapes TEXT, flops INTEGER, cpu_memory_bytes INTEGER, device_memory_bytes INTEGER, stack TEXT)"
        )
        connection.executemany(
            f"INSERT INTO events VALUES ({', '.join('?' * 10)})",
            (
                (
                    event.name,
                    event.device_type.name.lower(),
                    event.thread,
                    event.time_range.start,
                    event.time_range.elapsed_us(),
                    str(event.input_shapes),
                    event.flops or 0,
                    event.cpu_memory_usage,
                    event.device_memory_usage,
                    "\n".join(event.stack or ()),
                )
                for event in profile.events()
            ),
        )
        if with_summary:
            connection.execute(
                "CREATE TABLE operators "
                "(name TEXT, calls INTEGER, self_cpu_us REAL, self_device_us REAL, flops INTEGER)"
            )
            connection.executemany(
                "INSERT INTO operators VALUES (?, ?, ?, ?, ?)",
                (
                    (row.key, row.count, row.self_cpu_time_total, row.self_device_time_total, row.flops or 0)
                    for row in profile.key_averages()
                ),
            )
    connection.close()
