"""`--noop-layers`: layers that do nothing, so that stages have equal numbers of layers."""

from __future__ import annotations

import argparse

from mindspeed_llm.core import layer_layout
from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature
from mindspeed_llm.flag import numbers


class NoopLayers(Feature):
    """A layer spec does it, see `core.noop_layer`; whether the positions exist, `training.arguments` checks."""

    name = "noop_layers"
    description = "layers that do nothing, to fill up pipeline stages"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--noop-layers`."""
        group.add_argument(
            "--noop-layers",
            type=numbers,
            metavar="N,N,...",
            help="positions (from 0) of layers that do nothing; --num-layers counts them.",
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether there are any."""
        return bool(args.noop_layers)

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse a stage without any parameter: one of noop layers only, with neither embedding nor loss."""
        if not self.is_on(args):
            return
        stages, chunks = args.pipeline_model_parallel_size, layer_layout.chunks(args)
        for stage in range(1, stages - 1):
            if not any(chunk.layers for chunk in chunks if chunk.stage == stage):
                raise UserError(
                    f"--noop-layers {','.join(map(str, args.noop_layers))}: stage {stage} (from 0) of "
                    f"--pipeline-model-parallel-size {stages} would have noop layers only, and nothing to train; "
                    "choose other positions, or fewer stages"
                )
