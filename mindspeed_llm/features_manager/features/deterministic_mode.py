"""`--deterministic-mode`: two runs of one command give the same bits."""

from __future__ import annotations

import argparse

from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature


class DeterministicMode(Feature):
    """Torch's deterministic algorithms and the device libraries' variables, which `platform.random.seed_everything`
    sets at start-up, and megatron-core's `deterministic_mode`, which avoids its own operators that are not.
    """

    name = "deterministic_mode"
    description = "the same bits in each run"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--deterministic-mode`; `--npu-deterministic` and `--use-deter-comp` are other names of it."""
        group.add_argument(
            "--deterministic-mode",
            action="store_true",
            help="use deterministic operators; an operator that has no such version stops the run.",
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether the flag is given."""
        return args.deterministic_mode
