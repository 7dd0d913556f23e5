"""`--use-flash-attn`: attention by the device's kernel, which keeps no scores."""

from __future__ import annotations

import argparse

from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature


class FlashAttention(Feature):
    """`core.attention` reads it from the configuration: causal, packed documents, sliding window, grouped KV heads."""

    name = "flash_attention"
    description = "attention by the device's fused kernel, which keeps no scores"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--use-flash-attn`."""
        group.add_argument(
            "--use-flash-attn", action="store_true", help="attention by the device's fused kernel: no scores in memory."
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether the flag is given."""
        return args.use_flash_attn
