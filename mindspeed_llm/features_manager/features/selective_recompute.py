"""Selective recomputation on machines without Transformer Engine."""

from __future__ import annotations

import argparse

from mindspeed_llm.features_manager.feature import Feature
from mindspeed_llm.features_manager.patches import Patches


class SelectiveRecompute(Feature):
    """megatron-core recomputes norms and activations through a class that asks Transformer Engine about fp8, unless it
    is told `fp8=None`; its own layers do not tell it so.
    """

    name = "selective_recompute"
    description = "recompute parts of layers without Transformer Engine"
    targets = ("megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__",)

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether anything is recomputed selectively. The feature has no flag of its own."""
        return args.recompute_granularity == "selective" or args.recompute_norm or args.recompute_activation_function

    def register_patches(self, patches: Patches, args: argparse.Namespace) -> None:
        """Wrap the constructor."""
        from mindspeed_llm.core.recompute import without_fp8

        patches.wrap(self.targets[0], without_fp8, feature=self.name)
