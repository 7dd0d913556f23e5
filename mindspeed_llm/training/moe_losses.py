"""The auxiliary losses of routers, for the log: mean over layers, micro batches and data-parallel ranks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

from mindspeed_llm.core.layer_layout import layers_at
from mindspeed_llm.platform.device import current_device


class MoeLosses:
    """Reads what megatron-core's routers note of their losses.

    megatron-core's own `track_moe_metrics` averages in collectives, which gloo and HCCL cannot. Its notes belong to
    the process: what an earlier run left there, its process groups with it, is thrown away.
    """

    def __init__(self, args: Namespace) -> None:
        self._num_layers = len(noting_layers(args))
        self._is_on = bool(args.num_experts)
        get_moe_layer_wise_logging_tracker().clear()

    def take(self, steps: int) -> dict[str, float]:
        """The losses by name (`load_balancing_loss`, `z_loss`, ...) per layer and micro batch, since the last call. A
        collective. Only training notes some.

        Args:
            steps: optimizer steps since then.
        """
        if not self._is_on:
            return {}
        tracker = get_moe_layer_wise_logging_tracker()
        found = {}
        # The same on all ranks of a stage; stages whose layers note nothing add zeros.
        for name, has_data, length in self._entries(tracker):
            entry = tracker.get(name) or _empty(has_data, length)
            values = entry["values"].clone()
            dist.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())
            if (group := entry.get("reduce_group")) is not None:
                dist.all_reduce(values, group=group)
            if (group := entry.get("avg_group")) is not None:
                dist.all_reduce(values, group=group)
                values /= group.size()
            if not entry.get("reduce_group_has_dp", False):
                data = parallel_state.get_data_parallel_group()
                dist.all_reduce(values, group=data)
                values /= data.size()
            found[name] = values.sum().item() / (self._num_layers * get_num_microbatches() * steps)
        clear_aux_losses_tracker()
        return found

    def _entries(self, tracker: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, bool, int]]:
        """What is noted on any rank: its name, whether its group has the data-parallel ranks, its length."""
        own = [(name, bool(it.get("reduce_group_has_dp")), len(it["values"])) for name, it in tracker.items()]
        gathered: list[list[tuple[str, bool, int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own)
        return sorted({entry for entries in gathered for entry in entries})


def noting_layers(args: Namespace) -> list[int]:
    """The positions of layers with experts whose router has losses: with local updates those above the local ones."""
    if not args.num_experts:
        return []
    final = args.lu_lora_final_layer_index
    kinds = zip(args.moe_layer_pattern, layers_at(args), strict=True)
    return [
        place
        for place, (has_experts, layer) in enumerate(kinds)
        if has_experts and (final is None or layer is None or layer > final)
    ]


def _empty(has_data: bool, length: int) -> dict[str, Any]:
    """The entry of a stage that has noted nothing, as routers make it."""
    group = (
        parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        if has_data
        else parallel_state.get_tensor_and_context_parallel_group()
    )
    values = torch.zeros(length, device=current_device())
    return {"values": values, "reduce_group": group, "reduce_group_has_dp": has_data}
