"""`--profile` and its details: which iterations and ranks are profiled, and what is recorded of them."""

from __future__ import annotations

import argparse

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature
from mindspeed_llm.flag import count, integer, one_of

LEVEL_CHOICES = ("level_none", "level0", "level1", "level2")
EXPORT_CHOICES = ("text", "db")


class Profiling(Feature):
    """The flags of `platform.profiling.Profiler`; `training.profiler` makes one of them."""

    name = "profiling"
    description = "record some iterations with the device's profiler"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--profile` and its details."""
        group.add_argument("--profile", action="store_true", help="record a profile with the device's profiler.")
        group.add_argument(
            "--profile-step-start",
            type=count,
            default=10,
            metavar="N",
            help="first iteration recorded, counted from 0 over the whole training (default 10).",
        )
        group.add_argument(
            "--profile-step-end",
            type=integer,
            default=12,
            metavar="N",
            help="iteration before which the profile ends; -1: the end of the run (default 12).",
        )
        group.add_argument(
            "--profile-ranks",
            type=integer,
            nargs="+",
            default=(0,),
            metavar="N",
            help="ranks that record; -1: all (default 0).",
        )
        group.add_argument(
            "--profile-level",
            type=one_of(LEVEL_CHOICES),
            default="level0",
            metavar="|".join(LEVEL_CHOICES),
            help="how much of the device's activity is recorded (default level0).",
        )
        group.add_argument(
            "--profile-export-type",
            type=one_of(EXPORT_CHOICES),
            default="text",
            metavar="|".join(EXPORT_CHOICES),
            help="format of the files (default text).",
        )
        group.add_argument(
            "--profile-data-simplification", action="store_true", help="leave out what can be derived from the rest."
        )
        group.add_argument("--profile-with-cpu", action="store_true", help="record the host's activity too.")
        group.add_argument("--profile-with-stack", action="store_true", help="record Python call stacks.")
        group.add_argument("--profile-with-memory", action="store_true", help="record memory use.")
        group.add_argument("--profile-record-shapes", action="store_true", help="record shapes of inputs.")
        group.add_argument(
            "--profile-save-path",
            default="./profile_dir",
            metavar="DIR",
            help="folder for profiles (default ./profile_dir).",
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether `--profile` is given."""
        return args.profile

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse iterations and ranks that there are none of."""
        if not self.is_on(args):
            return
        start, end = args.profile_step_start, args.profile_step_end
        if end != -1 and end <= start:
            raise UserError(
                f"--profile-step-end {end} is not above --profile-step-start {start}: no iteration would be recorded; "
                "expected a larger number, or -1 for the end of the run"
            )
        if start >= args.train_iters:
            raise UserError(
                f"--profile-step-start {start} is not below --train-iters {args.train_iters}: no iteration would be "
                "recorded; iterations are counted from 0"
            )
        wrong = [rank for rank in args.profile_ranks if not -1 <= rank < args.world_size]
        if wrong:
            raise UserError(
                f"--profile-ranks {' '.join(map(str, args.profile_ranks))}: there is no rank {wrong[0]} among "
                f"{args.world_size}; expected 0 to {args.world_size - 1}, or -1 for all"
            )
