"""`--use-fused-rmsnorm`: norms by the device's kernel."""

from __future__ import annotations

import argparse

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature


class FusedRmsnorm(Feature):
    """`core.norm` reads it from the configuration."""

    name = "fused_rmsnorm"
    description = "RMSNorm by the device's fused kernel"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--use-fused-rmsnorm`."""
        group.add_argument("--use-fused-rmsnorm", action="store_true", help="RMSNorm by the device's fused kernel.")

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether the flag is given."""
        return args.use_fused_rmsnorm

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse it for a model with other norms."""
        if self.is_on(args) and args.normalization != "RMSNorm":
            raise UserError(
                f"--use-fused-rmsnorm goes with --normalization RMSNorm, found {args.normalization}; leave it out"
            )
