"""`--use-fused-swiglu`: the activation of gated MLPs by the device's kernel."""

from __future__ import annotations

import argparse

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature


class FusedSwiglu(Feature):
    """Layer specs do it: `core.swiglu` is the activation function of MLPs, experts and shared experts."""

    name = "fused_swiglu"
    description = "SwiGLU by the device's fused kernel"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--use-fused-swiglu`."""
        group.add_argument("--use-fused-swiglu", action="store_true", help="SwiGLU by the device's fused kernel.")

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether the flag is given."""
        return args.use_fused_swiglu

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse it for a model without SwiGLU."""
        if self.is_on(args) and not args.swiglu:
            raise UserError("--use-fused-swiglu: the model has no SwiGLU; add --swiglu, or leave it out")
