"""`--enable-recompute-layers-per-pp-rank`: `--recompute-num-layers` counts the layers of a whole pipeline stage."""

from __future__ import annotations

import argparse
from functools import partial

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature
from mindspeed_llm.features_manager.patches import Patches

_FLAG = "--enable-recompute-layers-per-pp-rank"


class RecomputeLayersPerStage(Feature):
    """With virtual stages, megatron-core recomputes so many layers of each part of a stage; here of all its parts
    together, dealt out to them in turns. Without virtual stages both are the same.
    """

    name = "recompute_layers_per_stage"
    description = "count recomputed layers over all virtual parts of a pipeline stage"
    targets = ("megatron.core.transformer.transformer_block.TransformerBlock._checkpointed_forward",)

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--enable-recompute-layers-per-pp-rank`."""
        group.add_argument(
            _FLAG,
            action="store_true",
            help="--recompute-num-layers counts layers of a stage, all its virtual parts together.",
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether the flag is given."""
        return args.enable_recompute_layers_per_pp_rank

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse it where no number of layers is counted per part."""
        if args.enable_recompute_layers_per_pp_rank and args.recompute_method != "block":
            raise UserError(
                f"{_FLAG} says how --recompute-num-layers is counted by --recompute-granularity full "
                f"--recompute-method block, found --recompute-method {args.recompute_method}; leave it out, or set "
                "these"
            )

    def register_patches(self, patches: Patches, args: argparse.Namespace) -> None:
        """Wrap the forward pass of blocks that recompute."""
        from mindspeed_llm.core.recompute import with_share_of_stage

        num_parts = args.virtual_pipeline_model_parallel_size or 1
        patches.wrap(self.targets[0], partial(with_share_of_stage, num_parts=num_parts), feature=self.name)
