"""Adapters on experts whose weights stand in one matrix: one for each expert, stacked like the weights.

    weight1_lora_a  [hidden, experts * rank]    the memory of [experts, hidden, rank]
    weight1_lora_b  [rank, experts * 2 * ffn]                 [experts, rank, 2 * ffn], gate, then up
    weight2_lora_a  [experts * ffn, rank]                     [experts, ffn, rank]
    weight2_lora_b  [experts * rank, hidden]                  [experts, rank, hidden]

ffn is this rank's share under expert tensor parallelism. An adapter is one for gate and up together: there is no form
per projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.moe.experts import GroupedMLP
from torch import Tensor, nn

from mindspeed_llm.core.lora.halves import Cut, initial_a, mark
from mindspeed_llm.core.lora.settings import LoraSettings
from mindspeed_llm.core.moe.grouped_experts import GroupedExperts, multiply


class LoraGroupedExperts(GroupedExperts):
    """`GroupedExperts` with adapters; `add_adapters` makes it of one without."""

    lora: LoraSettings
    enabled: bool

    def first_products(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """tokens [T, hidden] -> gate and up [T, 2 * ffn]"""
        product = super().first_products(tokens, counts)
        if not (self.enabled and hasattr(self, "weight1_lora_a")):
            return product
        a, b = (self._stacked(name) for name in ("weight1_lora_a", "weight1_lora_b"))
        # Each tensor parallel rank has a part of the gradient behind its rows.
        short = multiply(tokens, counts, self._summed(a))
        return product + multiply(short * self.lora.scale, counts, b)

    def second_products(self, inner: Tensor, counts: Sequence[int]) -> Tensor:
        """[T, ffn] -> [T, hidden], this rank's part of the sum."""
        product = super().second_products(inner, counts)
        if not (self.enabled and hasattr(self, "weight2_lora_a")):
            return product
        a, b = (self._stacked(name) for name in ("weight2_lora_a", "weight2_lora_b"))
        return product + multiply(multiply(inner, counts, a) * self.lora.scale, counts, self._summed(b))

    def _summed(self, matrices: Tensor) -> Tensor:
        """Matrices that all tensor parallel ranks have: their gradient is summed over the ranks."""
        return copy_to_tensor_model_parallel_region(matrices, group=self.tp_group)

    def _stacked(self, name: str) -> Tensor:
        return getattr(self, name).view(_sizes(self, name))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Where tensors lie in the whole model, see megatron-core; adapters as [experts, in, out] of all experts."""
        adapters = {name: self._parameters.pop(name) for name in list(self._parameters) if "_lora_" in name}
        try:
            found = GroupedMLP.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        finally:
            self._parameters.update(adapters)
        for name, parameter in adapters.items():
            found[f"{prefix}{name}"] = self._place(f"{prefix}{name}", name, parameter, sharded_offsets)
        return found

    def _place(self, key: str, name: str, parameter: Any, offsets: tuple[Any, ...]) -> ShardedTensorFactory:
        before, size = len(offsets), _sizes(self, name)
        cut_axis = {"weight1_lora_b": 3, "weight2_lora_a": 1}.get(name)
        # Gate and up are cut each on its own.
        view = (*size[:2], 2, size[2] // 2) if name == "weight1_lora_b" else size
        ranks = (self.tp_group.rank(), self.tp_group.size())
        axes = [(before, self.ep_group.rank(), self.ep_group.size())]
        if cut_axis is not None:
            axes.append((before + cut_axis, *ranks))
        copy = 0 if cut_axis is not None else ranks[0]

        def build(key: str, values: Tensor, replica: Any, flattened: Any) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                key, values.view(view), *offsets, *axes, replica_id=replica, prepend_axis_num=before
            )

        return ShardedTensorFactory(
            key, parameter, build, lambda loaded: loaded.view(parameter.shape), (0, copy, self.dp_group.rank())
        )


def add_adapters(experts: GroupedExperts, settings: LoraSettings, name: str) -> list[str]:
    """Add the adapters that `settings` asks for; returns the targets that were found.

    Args:
        name: of the experts, for `initial_a`: an expert's adapter begins with the same numbers wherever it is.
    """
    found = [target for target in ("linear_fc1", "linear_fc2") if target in settings.targets]
    if not found:
        return []
    experts.__class__ = LoraGroupedExperts
    assert isinstance(experts, LoraGroupedExperts)
    experts.lora, experts.enabled = settings, True
    for target in found:
        number = target[-1]
        like, keys = getattr(experts, f"weight{number}"), [f"weight{number}_lora_{half}" for half in "ab"]
        a, b = (torch.empty(_sizes(experts, key), dtype=like.dtype, device=like.device) for key in keys)
        b.zero_()
        inputs = a.shape[1]
        columns = number == "2"
        ranks = experts.tp_group
        first = ranks.rank() * inputs if columns else 0
        for local in range(experts.num_local_experts):
            expert = experts.ep_group.rank() * experts.num_local_experts + local
            whole = initial_a(
                f"{name}.{expert}.{target}",
                settings.seed,
                settings.rank,
                inputs * ranks.size() if columns else inputs,
            )
            a[local].copy_(whole[:, first : first + inputs].t())
        cut = Cut(axis=int(columns), index=ranks.rank(), count=ranks.size(), group=ranks)
        for key, values, is_cut in ((keys[0], a, columns), (keys[1], b, not columns)):
            parameter = nn.Parameter(values.view(_stored(experts, key)))
            parameter.allreduce = getattr(like, "allreduce", True)  # type: ignore[attr-defined]
            mark(parameter, cut, is_cut=is_cut, is_expert=True)
            experts.register_parameter(key, parameter)
    return found


def _sizes(experts: LoraGroupedExperts, name: str) -> tuple[int, int, int]:
    """[experts, in, out] of a parameter of the adapters."""
    count, hidden, rank = experts.num_local_experts, experts.config.hidden_size, experts.lora.rank
    ffn = experts.config.moe_ffn_hidden_size // experts.tp_group.size()
    return {
        "weight1_lora_a": (count, hidden, rank),
        "weight1_lora_b": (count, rank, 2 * ffn),
        "weight2_lora_a": (count, ffn, rank),
        "weight2_lora_b": (count, rank, hidden),
    }[name]


def _stored(experts: LoraGroupedExperts, name: str) -> tuple[int, int]:
    count, inputs, outputs = _sizes(experts, name)
    return (inputs, count * outputs) if name.startswith("weight1") else (count * inputs, outputs)
