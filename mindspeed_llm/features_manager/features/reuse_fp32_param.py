"""`--reuse-fp32-param`: bf16 parameters that are the upper halves of their fp32 masters."""

from __future__ import annotations

import argparse

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature


class ReuseFp32Param(Feature):
    """`core.shared_master` does it; `training.setup` makes the optimizer one of its kind."""

    name = "reuse_fp32_param"
    description = "no fp32 master beside a bf16 parameter, only its lower half"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--reuse-fp32-param`."""
        group.add_argument(
            "--reuse-fp32-param",
            action="store_true",
            help="bf16 parameters are the upper halves of their fp32 masters, 2 bytes less for each; rounds half up.",
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether the flag is given."""
        return args.reuse_fp32_param

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse it where there is no master whose upper half a parameter could be."""
        if not self.is_on(args) or args.bf16:
            return
        if args.fp16:
            reason = "with --fp16 a parameter has other exponents than its fp32 master, and is no half of it"
        else:
            reason = "parameters are fp32 themselves, and have no master"
        raise UserError(f"--reuse-fp32-param goes with --bf16: {reason}; add --bf16, or leave it out")
