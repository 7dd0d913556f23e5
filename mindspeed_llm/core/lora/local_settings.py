"""Which adapters are updated by a local rule, and how fast; needs no torch."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """`core.lora.local_learning` has the rule."""

    final_layer: int
    """The last layer with local updates; layers are counted as the model's weights count them, from 0."""
    rate: float
    """Of A where the schedule of the learning rate stands at `--lr`."""
    ratio: float
    """The rate of B divided by the one of A, also in the layers that backpropagation trains."""


def local_settings(args: Namespace) -> LocalSettings | None:
    """What the flags of a run say; None without `--lu-lora-final-layer-index`."""
    if args.lu_lora_final_layer_index is None:
        return None
    return LocalSettings(final_layer=args.lu_lora_final_layer_index, rate=args.lu_lora_lr, ratio=args.lu_lora_lr_ratio)
