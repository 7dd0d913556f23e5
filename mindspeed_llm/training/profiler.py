"""The profiler that the arguments of a run describe."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.platform import distributed
from mindspeed_llm.platform.profiling import Profiler


def profiler_of(args: Namespace, iteration: int) -> Profiler:
    """A profiler for a run that begins after `iteration`; does nothing without `--profile`."""
    return Profiler(
        enabled=args.profile,
        step_start=max(args.profile_step_start - iteration, 1),
        step_end=max(args.profile_step_end - iteration, 1),
        ranks=args.profile_ranks,
        level=args.profile_level,
        export_type=args.profile_export_type,
        data_simplification=args.profile_data_simplification,
        with_cpu=args.profile_with_cpu,
        with_stack=args.profile_with_stack,
        with_memory=args.profile_with_memory,
        record_shapes=args.profile_record_shapes,
        save_path=args.profile_save_path,
        rank=distributed.rank(),
    )
