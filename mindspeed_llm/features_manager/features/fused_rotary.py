"""`--use-fused-rotary-pos-emb`: rotary positions by the device's kernel."""

from __future__ import annotations

import argparse
from typing import ClassVar

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature
from mindspeed_llm.features_manager.patches import Patches

_APPLY = "megatron.core.models.common.embeddings.rope_utils.apply_rotary_pos_emb"


class FusedRotary(Feature):
    """A patch: megatron-core's attention layers call one function by name, and no setting names another."""

    name = "fused_rotary"
    description = "rotary positions by the device's fused kernel"
    targets: ClassVar[tuple[str, ...]] = (_APPLY,)

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--use-fused-rotary-pos-emb`."""
        group.add_argument(
            "--use-fused-rotary-pos-emb", action="store_true", help="rotary positions by the device's fused kernel."
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether the flag is given."""
        return args.use_fused_rotary_pos_emb

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse it for a model with other positions."""
        if self.is_on(args) and args.position_embedding_type != "rope":
            raise UserError(
                f"--use-fused-rotary-pos-emb goes with --position-embedding-type rope, found "
                f"{args.position_embedding_type}; leave it out"
            )

    def register_patches(self, patches: Patches, args: argparse.Namespace) -> None:
        """Wrap the function that turns queries and keys."""
        from mindspeed_llm.core.fused_rotary import with_fused_kernel

        patches.wrap(_APPLY, with_fused_kernel, feature=self.name)
