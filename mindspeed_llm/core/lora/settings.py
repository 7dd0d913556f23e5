"""Which layers get adapters, and of what size; needs no torch.

fused           linear_qkv, linear_fc1: one A for all parts of a layer
per projection  linear_q, linear_k, linear_v, linear_fc1_gate, linear_fc1_up: an A for each part, as PEFT has it
in both forms   linear_proj, linear_fc2
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

PARTS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_gate", "linear_fc1_up"),
}
"""The parts of fused layers, in the order of their rows."""
LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The linear layers that can have adapters, wherever they stand: in attention, MLPs, experts, shared experts."""
TARGETS = (*LAYERS, *(part for parts in PARTS.values() for part in parts))
"""The values of `--lora-target-modules`."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """An adapter on a layer W computes W x + alpha / rank * B A x, with A [rank, in] and B [out, rank]."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int
    """Of the initial A."""

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / self.rank

    def parts_of(self, layer: str) -> tuple[str, ...]:
        """The parts of a layer with adapters of their own: the layer itself in the fused form, none without adapter."""
        if layer in self.targets:
            return (layer,)
        return tuple(part for part in PARTS.get(layer, ()) if part in self.targets)


def lora_settings(args: Namespace) -> LoraSettings | None:
    """What the flags of a run say; None without `--lora-target-modules`."""
    if not args.lora_target_modules:
        return None
    return LoraSettings(
        rank=args.lora_r, alpha=args.lora_alpha, targets=tuple(args.lora_target_modules), seed=args.seed
    )
