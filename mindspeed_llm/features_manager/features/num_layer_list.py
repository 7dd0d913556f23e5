"""`--num-layer-list`: pipeline stages of uneven length."""

from __future__ import annotations

import argparse

from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature
from mindspeed_llm.flag import numbers


class NumLayerList(Feature):
    """megatron-core's `pipeline_model_parallel_layout` does it, see `core.layer_layout.config_fields`.

    Whether the list fits the number of stages and layers, `training.arguments` checks with all other sizes.
    """

    name = "num_layer_list"
    description = "pipeline stages of uneven length"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--num-layer-list`."""
        group.add_argument(
            "--num-layer-list",
            type=numbers,
            metavar="N,N,...",
            help="number of layers of each pipeline stage; their sum is --num-layers.",
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether there is a list."""
        return args.num_layer_list is not None
