"""`--recompute-activation-function`: activations of MLPs are computed again in the backward pass."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature
from mindspeed_llm.features_manager.features.recompute_norm import refuse_full, selective
from mindspeed_llm.features_manager.patches import Patches

_FLAG = "--recompute-activation-function"
_COVERING = {"mlp", "moe"}


class RecomputeActivationFunction(Feature):
    """Keeps what goes into the activation function, not what comes out of it.

    megatron-core has this for grouped experts (`moe_act`) only. For MLPs of other layers, for shared experts and for
    experts one by one, the forward pass of its `MLP` is wrapped.
    """

    name = "recompute_activation_function"
    description = "compute activation functions of MLPs again in the backward pass"
    targets = ("megatron.core.transformer.mlp.MLP.forward",)

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--recompute-activation-function`."""
        group.add_argument(
            _FLAG, action="store_true", help="keep no outputs of the activation functions of MLPs and experts."
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether the flag is given."""
        return args.recompute_activation_function

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse it beside recomputation of whole layers, MLPs or experts."""
        if not self.is_on(args):
            return
        refuse_full(args, _FLAG)
        covering = sorted(_COVERING.intersection(args.recompute_modules or ()))
        if covering:
            raise UserError(
                f"{_FLAG} computes a part of each MLP again, and --recompute-modules {' '.join(covering)} the whole of "
                "it; leave one of them out"
            )

    def settings(self, args: argparse.Namespace) -> Mapping[str, Any]:
        """`moe_act` where experts are grouped."""
        return selective(args, "moe_act") if args.moe_grouped_gemm else {}

    def register_patches(self, patches: Patches, args: argparse.Namespace) -> None:
        """Wrap the forward pass of MLPs."""
        from mindspeed_llm.core.recompute import recomputing_activation

        patches.wrap(self.targets[0], recomputing_activation, feature=self.name)
