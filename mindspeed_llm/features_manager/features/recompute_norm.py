"""`--recompute-norm`: outputs of norms are computed again in the backward pass instead of being kept."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature


class RecomputeNorm(Feature):
    """megatron-core's selective recomputation of `layernorm`: the two norms of each layer."""

    name = "recompute_norm"
    description = "compute norms again in the backward pass"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add `--recompute-norm`."""
        group.add_argument(
            "--recompute-norm",
            action="store_true",
            help="keep no outputs of the norms of layers: the same as --recompute-granularity selective "
            "--recompute-modules layernorm.",
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether the flag is given."""
        return args.recompute_norm

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse it beside recomputation of whole layers."""
        if self.is_on(args):
            refuse_full(args, "--recompute-norm")

    def settings(self, args: argparse.Namespace) -> Mapping[str, Any]:
        """`layernorm` beside what is recomputed already."""
        return selective(args, "layernorm")


def refuse_full(args: argparse.Namespace, flag: str) -> None:
    """Refuse a flag for parts of layers beside `--recompute-granularity full`."""
    if args.recompute_granularity == "full":
        raise UserError(
            f"{flag} computes a part of each layer again, and --recompute-granularity full whole layers; leave one of "
            "them out"
        )


def selective(args: argparse.Namespace, module: str) -> dict[str, Any]:
    """The settings that add a module of megatron-core's to what is recomputed selectively.

    They start from what `--recompute-modules` says (`training.arguments` has put in its default). Several features may
    add one each: the manager joins tuples.
    """
    modules = args.recompute_modules or ()
    return {
        "recompute_granularity": "selective",
        "recompute_modules": modules if module in modules else (*modules, module),
    }
