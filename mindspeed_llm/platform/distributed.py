"""Process group and device mesh of this process's device."""

from __future__ import annotations

import math
import os
import re
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mindspeed_llm.errors import UserError
from mindspeed_llm.platform.device import device_type

_BROKEN_COLLECTIVE = re.compile(
    r"Connection (closed|reset|refused|was likely closed)|Broken pipe|[Tt]imed? ?out|remote process|NCCL|HCCL|socket"
)
_POLL_S = 0.2
_FIRST_POLL_S = 0.005
_COLLECTIVE_BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


def collective_backend() -> str:
    """The backend of collectives on this process's device: "hccl", "nccl" or "gloo"."""
    return _COLLECTIVE_BACKENDS[device_type()]


def init_process_group(timeout_s: float = 1800) -> bool:
    """Create the default process group; select the device first (`device.current_device`).

    Besides the device's backend the group has gloo for CPU tensors, so that objects and host-side figures need no
    second group. Without torchrun's environment (RANK, WORLD_SIZE) it is a group of one process.

    Args:
        timeout_s: seconds after which a hanging collective fails.

    Returns:
        True if this call created the group, False if one exists already. Only the creator should destroy it.

    Raises:
        UserError: RANK or WORLD_SIZE is set but not a number, or one of the two is missing.
    """
    if dist.is_initialized():
        return False
    kind = device_type()
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{collective_backend()}"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return True
    for name in ("RANK", "WORLD_SIZE"):
        if name not in os.environ:
            raise UserError(f"{name} is not set although other variables of torchrun are; start with torchrun.")
    dist.init_process_group(
        backend,
        rank=_environment_number("RANK", 0),
        world_size=_environment_number("WORLD_SIZE", 1),
        timeout=timeout,
    )
    return True


def destroy_process_group() -> None:
    """Destroy the default process group and all others, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def new_host_group() -> dist.ProcessGroup:
    """A further group of all ranks for objects and tensors in host memory (a collective). Its messages do not queue up
    behind those of the device, so that a thread may use it while training goes on.
    """
    return dist.new_group(backend="gloo")


def wait_for_all() -> None:
    """Wait until every rank has come here, however long that takes: where ranks work on their own for hours, a
    collective would be waited for longer than its timeout. Every rank must call this the same number of times.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"mindspeed_llm/waits/{dist.get_rank()}", 1)
    store.add(f"mindspeed_llm/waits/arrived/{number}", 1)
    while store.add(f"mindspeed_llm/waits/arrived/{number}", 0) < dist.get_world_size():
        time.sleep(_POLL_S)
    # The store may live in a rank that ends next: until the others have looked, it must not.
    dist.all_reduce(torch.zeros(1))


def tell(name: str) -> None:
    """Let those go on that wait in `wait_until_told` for this name. A name can be told once only."""
    dist.distributed_c10d._get_default_store().set(_told(name), "")


def wait_until_told(name: str) -> None:
    """Wait, however long it takes, until a rank has said `tell(name)`."""
    store = dist.distributed_c10d._get_default_store()
    pause = _FIRST_POLL_S
    while not store.check([_told(name)]):
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S)


def _told(name: str) -> str:
    return f"mindspeed_llm/told/{name}"


def is_broken_collective(error: Exception) -> bool:
    """Whether `error` is what a backend raises when another rank does not answer (any more)."""
    return isinstance(error, RuntimeError) and _BROKEN_COLLECTIVE.search(str(error)) is not None


def averages_in_collectives() -> bool:
    """Whether the backend's reductions know ReduceOp.AVG; HCCL's operators are sum, product, maximum and minimum."""
    return collective_backend() != "hccl"


def exchanges_uneven_parts() -> bool:
    """Whether ranks may contribute parts of different sizes to all_gather and reduce_scatter; gloo refuses them, and
    HCCL promises nothing.
    """
    return collective_backend() == "nccl"


def rank() -> int:
    """Global rank: of the process group, before it exists of torchrun's environment, else 0."""
    return dist.get_rank() if dist.is_initialized() else _environment_number("RANK", 0)


def world_size() -> int:
    """Number of processes: of the process group, before it exists of torchrun's environment, else 1."""
    return dist.get_world_size() if dist.is_initialized() else _environment_number("WORLD_SIZE", 1)


def local_rank() -> int:
    """Rank within this node (LOCAL_RANK, else 0)."""
    return _environment_number("LOCAL_RANK", 0)


def is_rank_zero() -> bool:
    """Whether this process is global rank 0, the one that writes logs and files."""
    return rank() == 0


def device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh over all ranks, in rank order (the last axis has neighbouring ranks).

    The device type is given explicitly: torch's own choice would prefer an accelerator that MINDSPEED_DEVICE ruled out.

    Args:
        shape: number of ranks along each axis; the product must be the world size.
        names: one name per axis.
    """
    assert len(shape) == len(names), f"mesh {shape} needs one name per axis, got {names}"
    assert math.prod(shape) == world_size(), f"mesh {shape} does not cover {world_size()} ranks"
    return init_device_mesh(device_type(), shape, mesh_dim_names=names)


def _environment_number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(f"environment variable {name}={text!r}: expected a whole number (torchrun sets it).") from None
