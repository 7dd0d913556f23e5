"""The profiler that the arguments of a run describe."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.platform import distributed
from mindspeed_llm.platform.profiling import Profiler


def profiler_of(args: Namespace, iteration: int) -> Profiler:
    """A profiler for a run that begins after `iteration` iterations; does nothing without `--profile`.

    The flags count iterations over the whole training, from 0: a run that resumes records what is left of them, and
    nothing where they lie behind it.
    """
    start, end = args.profile_step_start, args.profile_step_end
    is_over = end != -1 and end <= iteration
    return Profiler(
        enabled=args.profile and not is_over,
        step_start=max(start - iteration, 0),
        step_end=end if end == -1 else end - iteration,
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
