"""Spots of megatron-core that need a CUDA device or Transformer Engine, and that no setting goes around."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, ClassVar

from mindspeed_llm.features_manager.feature import Feature
from mindspeed_llm.features_manager.patches import Patches

_MOE = "megatron.core.transformer.moe.moe_utils"
_ROUTER = f"{_MOE}.router_gating_linear"
_TO_CPU = f"{_MOE}.maybe_move_tensor_to_cpu"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"
_GATHER = f"{_MAPPINGS}._gather_along_first_dim"
_REDUCE_SCATTER = f"{_MAPPINGS}._reduce_scatter_along_first_dim"


class AnyDevice(Feature):
    """Always on: each of these spots fails, or means something else, where there is no CUDA device or no TE."""

    name: ClassVar[str] = "any_device"
    description: ClassVar[str] = "what megatron-core has for one device or one library only"
    targets: ClassVar[tuple[str, ...]] = (_ROUTER, _TO_CPU, _GATHER, _REDUCE_SCATTER)

    def is_on(self, args: argparse.Namespace) -> bool:
        """Always: experts of megatron-core do not run without."""
        return True

    def register_patches(self, patches: Patches, args: argparse.Namespace) -> None:
        """Put plain torch in place of Transformer Engine, and numbers and equal parts where gloo wants them."""
        from mindspeed_llm.core.moe.router_gating import router_gating_linear
        from mindspeed_llm.core.moe.uneven_parts import with_uneven_gather, with_uneven_reduce_scatter

        patches.replace(_ROUTER, router_gating_linear, feature=self.name)
        patches.wrap(_TO_CPU, _numbers_of_cpu_tensors, feature=self.name)
        patches.wrap(_GATHER, with_uneven_gather, feature=self.name)
        patches.wrap(_REDUCE_SCATTER, with_uneven_reduce_scatter, feature=self.name)


def _numbers_of_cpu_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Asked for NumPy, give it for a tensor that is on the CPU already, too: the sizes of an all-to-all are numbers
    then, as they are when they come from a CUDA device. Tensors in their place are refused by gloo.
    """

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        import torch

        found = original(tensor, as_numpy, record_stream)
        return found.numpy() if as_numpy and torch.is_tensor(found) else found

    return moved
