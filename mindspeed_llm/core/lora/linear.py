"""Adapters on megatron-core's parallel linear layers.

Ranks meet where vectors are shortest, behind A: [..., rank].

    column   x on all ranks       h = A x           B by rows, like W
             backward             the gradient of h is summed over ranks, so that of A is whole on each
      with sequence parallelism   h = gather(A x)   each rank has its part of x; A's gradient is summed over the
                                                    ranks at the end of a step, as those of norms are
    row      A by columns like W  h = sum(A x)      B on all ranks
      with sequence parallelism   h = each rank's part of sum(A x); B's gradient is summed at the end of a step

Experts, and shared experts whose communication is overlapped, get gathered inputs and sum their outputs themselves. So
an adapter's output must be a part of the sum as well; the matrix that all ranks have (A of a column layer, B of a row
layer) has its gradient summed over the ranks in the backward pass.

Shapes: S sequence, L this rank's part of it under sequence parallelism, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn
from torch.nn.functional import linear

from mindspeed_llm.core.lora.halves import Cut, Halves, initial_b, mark
from mindspeed_llm.core.lora.local_learning import LocalRule

Linear = ColumnParallelLinear | RowParallelLinear


@dataclass(frozen=True, kw_only=True)
class Rows:
    """How the rows of a fused layer are made up: of each part in turn, and that for each group (of attention heads)."""

    groups: int
    widths: tuple[int, ...]
    """Rows of each part in a group."""

    def join(self, outputs: Mapping[int, Tensor]) -> Tensor:
        """Outputs [..., groups * width] by the number of their part -> [..., rows]; zeros for parts without."""
        some = next(iter(outputs.values()))
        spread = [
            outputs[part].unflatten(-1, (self.groups, width))
            if part in outputs
            else some.new_zeros(*some.shape[:-1], self.groups, width)
            for part, width in enumerate(self.widths)
        ]
        return torch.cat(spread, dim=-1).flatten(-2)


def cut_of(layer: Linear) -> Cut:
    """How megatron-core cuts a layer."""
    group = layer.tp_group
    axis = 0 if isinstance(layer, ColumnParallelLinear) else 1
    return Cut(axis=axis, index=group.rank(), count=group.size(), group=group)


class LoraLinear(nn.Module):
    """A linear layer with an adapter for all of it (fused), or with one for some of its parts.

    Args:
        base_layer: the layer; its weight stands at `base_layer.weight` from now on.
        fused: the adapter for all of it, which becomes `lora_A` and `lora_B` here.
        parts: or adapters by the number of their part, which belong to the module that the layer belongs to.
        rows: how the rows of the layer are made up of parts.
        scale: alpha / rank.
        gated: the rows are gate and up, each cut on its own (for checkpoints).
    """

    def __init__(
        self,
        base_layer: Linear,
        *,
        scale: float,
        fused: Halves | None = None,
        parts: Mapping[int, Halves] | None = None,
        rows: Rows | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scale, self.gated, self.rows = scale, gated, rows
        self.enabled = True
        if fused is not None:
            self.lora_A, self.lora_B = fused.lora_A, fused.lora_B
        # In a list, so that torch does not take them for modules of this one.
        self._fused = [fused] if fused is not None else []
        self._parts = sorted((parts or {}).items())
        assert bool(self._fused) != bool(self._parts)
        self.local_rule: LocalRule | None = None
        for halves in self._halves:
            self._mark(halves)

    def learn_locally(self, seed: int) -> None:
        """Have the adapters learn from what passes through them instead of from gradients.

        Args:
            seed: of the initial B.
        """
        base = self.base_layer
        assert not base.explicit_expert_comm, "the ranks' inputs are not those of one rank's tokens"
        for halves in self._halves:
            rank, outputs = halves.b.shape[1], halves.b.shape[0]
            count = halves.cut.count if halves.cut.axis == 0 else 1
            whole = initial_b(halves.name, seed, rank, outputs * count)
            halves.begin_b(whole, blocks=2 if self.gated and self._fused else 1)
        self.local_rule = LocalRule(
            self._halves,
            is_column=isinstance(base, ColumnParallelLinear),
            sequence_parallel=base.sequence_parallel,
        )

    @property
    def _halves(self) -> list[Halves]:
        return self._fused or [halves for _, halves in self._parts]

    def _mark(self, halves: Halves) -> None:
        base, is_column = self.base_layer, isinstance(self.base_layer, ColumnParallelLinear)
        # Which gradients are summed over data-parallel ranks of experts, and which over all.
        for parameter in (halves.a, halves.b):
            parameter.allreduce = getattr(base.weight, "allreduce", True)  # type: ignore[attr-defined]
        if base.is_expert:
            mark(halves.a, halves.cut, is_cut=not is_column, is_expert=True)
            mark(halves.b, halves.cut, is_cut=is_column, is_expert=True)
        if base.sequence_parallel and not base.explicit_expert_comm and halves.cut.count > 1:
            (halves.a if is_column else halves.b).sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, input_: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """See the layer: [S or L, B, inputs] -> [S or L, B, outputs], and its bias where that is left to the caller."""
        output, bias = self.base_layer(input_, *arguments, **options)
        if not self.enabled:
            return output, bias
        return output + self._adapted(input_), bias

    def _adapted(self, input_: Tensor) -> Tensor:
        base, halves = self.base_layer, self._halves
        # Those of a local rule are fp32 whatever the model computes in.
        matrices = [(a.to(input_.dtype), b.to(input_.dtype)) for a, b in (each() for each in halves)]
        a, bs = torch.cat([a for a, _ in matrices]), [b for _, b in matrices]
        group = base.tp_group
        if base.explicit_expert_comm:
            if isinstance(base, ColumnParallelLinear):
                a = copy_to_tensor_model_parallel_region(a, group=group)
            else:
                bs = [copy_to_tensor_model_parallel_region(b, group=group) for b in bs]
            short = linear(input_, a)
        else:
            own = linear(input_, a)
            if isinstance(base, ColumnParallelLinear):
                short = to_rows(own, group, sequence_parallel=base.sequence_parallel)
            else:
                short = own = from_columns(own, group, sequence_parallel=base.sequence_parallel)
            if self.local_rule is not None:
                self.local_rule.add(input_, own)
        # All adapters of a layer have one rank.
        shares = (short * self.scale).chunk(len(bs), dim=-1)
        outputs = [_TimesB.apply(each, b) for each, b in zip(shares, bs, strict=True)]
        if self._fused:
            return outputs[0]
        assert self.rows is not None
        return self.rows.join(dict(zip((part for part, _ in self._parts), outputs, strict=True)))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Where tensors lie in the whole model, see megatron-core. In such a checkpoint the layer's own keep the names
        that they have without an adapter, so that it can be loaded with and without one.
        """
        found = {
            f"{prefix}base_layer.{key.removeprefix(prefix)}": place
            for key, place in self.base_layer.sharded_state_dict(prefix, sharded_offsets, metadata).items()
        }
        for fused in self._fused:
            found |= fused.sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.gated:
            apart = (metadata or {}).get("singleton_local_shards", False)
            for key in (f"{prefix}base_layer.weight", f"{prefix}base_layer.bias", f"{prefix}lora_B.default.weight"):
                if key in found:
                    found[key] = apply_swiglu_sharded_factory(found[key], sharded_offsets, apart)
        return found


class _TimesB(torch.autograd.Function):
    """`linear(short, b)` with another order of factors in the gradient of B.

    Torch's own, g^T short, reads the gradient of the output by columns, and for a part of a layer the rows of that are
    strided as well. Of the product's transpose it reads rows: on one core 0.2 ms instead of 2.3 for a half of [512,
    3072] and rank 8.
    """

    @staticmethod
    def forward(ctx: Any, short: Tensor, b: Tensor) -> Tensor:
        """[..., rank], [outputs, rank] -> [..., outputs]"""
        ctx.save_for_backward(short, b)
        return linear(short, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """[..., outputs] -> the gradients of both."""
        short, b = ctx.saved_tensors
        of_short, of_b = ctx.needs_input_grad
        return (
            gradient @ b if of_short else None,
            # Contiguous, since megatron-core sums it over ranks in place.
            (short.flatten(0, -2).t() @ gradient.flatten(0, -2)).t().contiguous() if of_b else None,
        )


def to_rows(short: Tensor, group: Any, *, sequence_parallel: bool) -> Tensor:
    """A x, in front of the ranks' rows of B: [S or L, B, rank] -> [S, B, rank], whose gradient is summed over ranks."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(short, tensor_parallel_output_grad=True, group=group)
    return copy_to_tensor_model_parallel_region(short, group=group)


def from_columns(short: Tensor, group: Any, *, sequence_parallel: bool) -> Tensor:
    """The ranks' columns of A times their x: [S, B, rank] -> the sum [S, B, rank], or this rank's part [L, B, rank]."""
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(short, group=group)
    return reduce_from_tensor_model_parallel_region(short, group=group)
