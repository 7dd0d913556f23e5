"""The parameters and moments of megatron-core's distributed optimizer, put together from data-parallel ranks and back.

    buffer      [ bucket 0: parameter, gap, parameter, padding ][ bucket 1: ... , padding ]
    rank r      the r-th part of each bucket, across the limits of parameters

Two forms are written. By buffers, as Megatron's rank files have it: a flat tensor for each buffer, without the padding
of buckets. By parameters, in their full shapes, for checkpoints that can be cut in another way. megatron-core has a
function for the latter, too (`fully_reshardable`), which looks for parameters at their places in the padded buffer, and
is wrong from the second bucket on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from mindspeed_llm.checkpoints.files import DamagedCheckpoint
from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.torch_file import StoredTensor
from mindspeed_llm.training.checkpointing.optimizer_state import MOMENTS, STEP

PARAM = "param"
KEYS = (PARAM, *MOMENTS)
ByParameter = dict[nn.Parameter, dict[str, Tensor]]


def gather_buffers(part: DistributedOptimizer) -> dict[Any, Any] | None:
    """By buffers, on the first data-parallel rank (a collective of those ranks); None on the others."""
    return part.get_parameter_state_dp_zero()


def buffer_layout(part: DistributedOptimizer) -> list[list[tuple[int, int]]]:
    """For each buffer where its parameters lie in what `gather_buffers` gives: (first element, number)."""
    layout = []
    for buffer in part.buffers:
        padding, places = 0, []
        for bucket in buffer.buckets:
            for parameter in bucket.params_list:
                start, end, _ = buffer.param_index_map[parameter]
                places.append((start - padding, end - start))
            padding += bucket.grad_data.numel() - bucket.numel_unpadded
        layout.append(sorted(places))
    return layout


def check_buffers(part: DistributedOptimizer, saved: Any, layout: Any, where: str) -> dict[Any, Any]:
    """What `scatter_buffers` takes, as tensors.

    Args:
        layout: what `buffer_layout` gave; None where it is not known. Buckets that end elsewhere leave gaps elsewhere,
            while the sizes may be the same.

    Raises:
        UserError: the buffers have other sizes, as with another --ddp-bucket-size.
        DamagedCheckpoint: something is missing.
    """
    if not isinstance(saved, Mapping):
        raise DamagedCheckpoint(f"{where}: holds a {type(saved).__name__}, expected the optimizer's state by buffers")
    if "buckets_coalesced" not in saved:
        raise DamagedCheckpoint(f"{where}: is in Megatron's format of before 2024, which is not read here")
    found: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(part.gbuf_ranges):
        for dtype in ranges:
            stored, size = saved.get(index, {}).get(dtype), part.buffers[index].numel_unpadded
            if not isinstance(stored, Mapping):
                raise DamagedCheckpoint(f"{where}: has no buffer {index} of {dtype}")
            same = layout is None or list(map(list, layout[index])) == list(map(list, buffer_layout(part)[index]))
            if stored.get("numel_unpadded") != size or not same:
                raise UserError(
                    f"{where}: buffer {index} of the distributed optimizer ({stored.get('numel_unpadded')} elements) "
                    f"is laid out otherwise than here ({size} elements): parameters were put into other buckets, as "
                    "with another --ddp-bucket-size or other overlaps; set the flags back, or give --no-load-optim"
                )
            tensors: dict[str, Any] = {}
            for name in KEYS:
                value = stored.get(name)
                tensors[name] = value.view() if isinstance(value, StoredTensor) else value
                if not isinstance(tensors[name], Tensor) or tensors[name].numel() != size:
                    raise DamagedCheckpoint(f"{where}: {name} of buffer {index} is missing or too short")
            found[index] = {dtype: {**tensors, "numel_unpadded": size}}
    return found


def scatter_buffers(part: DistributedOptimizer, saved: Mapping[Any, Any] | None) -> None:
    """The inverse of `gather_buffers`, which gave `saved` on the first rank (a collective)."""
    with _steps_aside(part), torch.no_grad():
        part.load_parameter_state_from_dp_zero(saved)


def gather_parameters(part: DistributedOptimizer) -> ByParameter | None:
    """By parameters, in fp32 in host memory, on the first data-parallel rank (a collective of those ranks); None on the
    others.
    """
    group = part.data_parallel_group_gloo
    first, size = dist.get_global_rank(group, 0), group.size()
    whole: ByParameter = {}
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        places = buffer.param_index_map
        for of_buckets in ranges.values():
            for bucket, bucket_range in zip(buffer.buckets, of_buckets, strict=True):
                for name in KEYS:
                    shard = torch.zeros(bucket.grad_data.numel() // size, dtype=torch.float32, device="cpu")
                    for parameter, where in bucket_range["param_map"].items():
                        place = where["gbuf_local"]
                        shard[place.start : place.end].copy_(_states(part, parameter)[name])
                    shards = [torch.empty_like(shard) for _ in range(size)] if group.rank() == 0 else None
                    dist.gather(shard, shards, dst=first, group=group)
                    if shards is None:
                        continue
                    joined = torch.cat(shards)
                    for parameter in bucket.params_list:
                        start, end, _ = places[parameter]
                        values = joined[start - bucket.offset : end - bucket.offset].view(parameter.shape)
                        whole.setdefault(parameter, {})[name] = values
    return whole if group.rank() == 0 else None


def room_for_parameters(part: DistributedOptimizer) -> ByParameter:
    """Tensors for `fill_shards`, to be filled first. Shards of fp32 parameters are parts of the model itself."""
    return {
        parameter: {
            name: torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            for name in (MOMENTS if parameter.dtype == torch.float32 else KEYS)
        }
        for buffer in part.buffers
        for parameter in buffer.param_index_map
    }


def fill_shards(part: DistributedOptimizer, whole: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
    """Copy this rank's shards out of whole parameters and moments, as `room_for_parameters` has them."""
    with torch.no_grad():
        for ranges in part.gbuf_ranges:
            for of_buckets in ranges.values():
                for bucket_range in of_buckets:
                    for parameter, where in bucket_range["param_map"].items():
                        place, states = where["param"], _states(part, parameter)
                        for name, values in whole[parameter].items():
                            states[name].copy_(values.reshape(-1)[place.start : place.end])


def _states(part: DistributedOptimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """This rank's shards of a parameter and its moments: the tensors themselves."""
    return part._get_main_param_and_optimizer_states(parameter)


@contextlib.contextmanager
def _steps_aside(part: DistributedOptimizer) -> Iterator[None]:
    """Within this context states hold moments only, which is what megatron-core's loading function expects."""
    steps = [(state, state.pop(STEP)) for state in part.optimizer.state.values() if STEP in state]
    try:
        yield
    finally:
        for state, step in steps:
            state[STEP] = step
