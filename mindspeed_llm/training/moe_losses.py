"""The auxiliary losses of routers, for the log: mean over layers, micro batches and data-parallel ranks."""

from __future__ import annotations

from argparse import Namespace

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker


class MoeLosses:
    """Reads what megatron-core's routers note of their losses.

    megatron-core's own `track_moe_metrics` averages in collectives, which gloo and HCCL cannot.
    """

    def __init__(self, args: Namespace) -> None:
        pattern = args.moe_layer_pattern if args.num_experts else []
        self._num_layers = sum(pattern) if isinstance(pattern, list) else args.num_layers
        self._is_on = bool(args.num_experts)

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
        # The same on all ranks of a stage, and stages without experts have noted nothing: the union, in one order.
        for name in self._names(list(tracker)):
            entry = tracker.get(name)
            assert entry is not None, f"some stages have no {name}: each must have a layer with experts"
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

    def _names(self, own: list[str]) -> list[str]:
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own)
        return sorted({name for names in gathered for name in names})
