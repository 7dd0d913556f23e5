"""bf16 parameters that are the upper halves of their fp32 masters, so that no parameter is in memory twice.

    fp32 master    [ sign, exponent, 7 bits | 16 bits ]
    in memory      [ bf16 parameter         | int16 remainder ]

The parameter is the master rounded half up (away from zero): 0x8000 is added to the bits of the master, then the lower
half is cut off. The remainder is the rest, with its sign: how many last places of fp32 the master lies above or below
the parameter, from -32768 to 32767. Its 16 bits are the lower half of the master. Joined, the two are the master again,
bit for bit. Infinite masters stay infinite, and NaN stays NaN (of one kind: some kinds would be rounded to a number).

Between steps masters are not in memory: reading one gives NaN, writing one is an error of torch. `masters_in_fp32` puts
them there for as long as a checkpoint is written or read. A step does so for some parameters at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MixedPrecisionOptimizer
from torch import Tensor

PORTION = 64 * 2**20
"""Elements whose masters are in memory at once during a step, unless one parameter has more."""


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of a chain, without those that have no parameter on any rank of the world: where adapters alone
    are trained there may be none among experts, or none beside them.

    megatron-core aligns groups of parameters over all ranks: a rank without any parameter of a group that other ranks
    have still has an optimizer for it, so that the list has the same parts on every rank.
    """
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in chain if part.optimizer is not None]


def share_masters(optimizer: MegatronOptimizer) -> None:
    """Make the masters of an optimizer that megatron-core has built share their upper halves with the parameters.

    megatron-core builds its optimizers by itself and cannot be told a class, so they become subclasses here.

    Args:
        optimizer: of a bf16 model; distributed or not, before its first step.
    """
    for part in optimizer_parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            part.__class__ = _SharingDistributedOptimizer
        else:
            assert isinstance(part, Float16OptimizerWithFloat16Params), type(part)
            part.__class__ = _SharingFloat16Optimizer
        part.share()  # type: ignore[attr-defined]


@contextlib.contextmanager
def masters_in_fp32(optimizer: MegatronOptimizer, *, changed: bool = False) -> Iterator[None]:
    """A context in which all masters of an optimizer can be read as if it had them in memory.

    With optimizers that always have, nothing happens.

    Args:
        optimizer: of a run; contexts of one optimizer may stand in each other.
        changed: masters are written within, so that parameters follow at the end, on all data-parallel ranks (which is
            a collective of them then).
    """
    sharing = [part for part in optimizer_parts(optimizer) if isinstance(part, _SharingOptimizer)]
    with contextlib.ExitStack() as stack:
        for part in sharing:
            stack.enter_context(part.masters_in_fp32(changed=changed))
        yield
    if changed:
        for part in sharing:
            part.gather_parameters()


def split(master: Tensor, parameter: Tensor, remainder: Tensor) -> None:
    """Write a master as a parameter and a remainder.

    Args:
        master: fp32, any shape; NaN in it becomes the one kind of NaN that survives.
        parameter: bf16, as many elements.
        remainder: int16, as many elements.
    """
    master.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    lower, upper = _halves(master)
    remainder.copy_(lower)
    # 0 or -1: a remainder below zero has rounded up.
    _bits(parameter).copy_(upper - (remainder >> 15))


def join(parameter: Tensor, remainder: Tensor, master: Tensor) -> None:
    """The inverse of `split`: write to `master`."""
    lower, upper = _halves(master)
    lower.copy_(remainder)
    upper.copy_(_bits(parameter) + (remainder >> 15))


def _halves(master: Tensor) -> tuple[Tensor, ...]:
    """The lower and the upper 16 bits of each element, as views (on the little-endian machines that torch runs on)."""
    return master.view(-1).view(torch.int16).view(-1, 2).unbind(1)


def _bits(parameter: Tensor) -> Tensor:
    return parameter.view(-1).view(torch.int16)


class _SharedMaster:
    """One parameter (a shard of it with the distributed optimizer), its master and the remainder."""

    def __init__(self, parameter: Tensor, master: Tensor) -> None:
        self.master, self.in_memory = master, True
        self._parameter = parameter
        self._remainder = torch.empty(master.numel(), dtype=torch.int16, device=master.device)
        # One element that stands for all: reading gives NaN, and torch refuses to write.
        self._nowhere = torch.full((1,), math.nan, dtype=master.dtype, device=master.device).expand(master.shape)

    def join(self) -> None:
        """Put the master in memory."""
        values = torch.empty_like(self._nowhere, memory_format=torch.contiguous_format)
        join(self._parameter.detach(), self._remainder, values)
        self.master.data, self.in_memory = values, True

    def split(self) -> None:
        """Make parameter and remainder what the master is, which is in memory."""
        split(self.master, self._parameter.detach(), self._remainder)

    def release(self) -> None:
        """Take the master out of memory."""
        self.master.data, self.in_memory = self._nowhere, False


class _SharingOptimizer(MixedPrecisionOptimizer):
    """What the two kinds of optimizers have in common."""

    _shared: list[_SharedMaster]
    _in_memory: bool

    def share(self) -> None:
        """Begin to share."""
        self._in_memory = False
        self._shared = [_SharedMaster(parameter, master) for parameter, master in self._parameters_and_masters()]
        self._split_and_release(self._shared)

    def _parameters_and_masters(self) -> list[tuple[Tensor, Tensor]]:
        raise NotImplementedError

    @contextlib.contextmanager
    def _fp32_parameters_only(self) -> Iterator[None]:
        """A context in which copies from masters to parameters leave out what is shared."""
        raise NotImplementedError

    def gather_parameters(self) -> None:
        """Bring parameters of which each data-parallel rank has written a shard to all of them."""

    @contextlib.contextmanager
    def masters_in_fp32(self, *, changed: bool) -> Iterator[None]:
        """See the function of this name."""
        if self._in_memory:
            yield
            if changed:
                self._split()
            return
        for shared in self._shared:
            shared.join()
        self._in_memory = True
        try:
            yield
            if changed:
                self._split()
        finally:
            for shared in self._shared:
                shared.release()
            self._in_memory = False

    @torch.no_grad()
    def _split(self) -> None:
        for shared in self._shared:
            shared.split()

    @torch.no_grad()
    def _split_and_release(self, portion: Sequence[_SharedMaster]) -> None:
        for shared in portion:
            shared.split()
            shared.release()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """One step, some parameters at a time: the inner optimizer passes over those without a gradient."""
        assert not self._in_memory, "a step within masters_in_fp32"
        waiting = {parameter: parameter.grad for parameter in self.get_parameters()}
        for parameter in waiting:
            parameter.grad = None
        *portions, last = self._portions()
        for portion in portions:
            self._join(portion, waiting)
            self.optimizer.step()
            self._split_and_release(portion)
            for shared in portion:
                shared.master.grad = None
        self._join(last, waiting)
        # Parameters that are fp32 themselves are left.
        for parameter, gradient in waiting.items():
            parameter.grad = gradient
        return super().step_with_ready_grads()

    def _join(self, portion: Sequence[_SharedMaster], waiting: dict[Tensor, Tensor | None]) -> None:
        for shared in portion:
            shared.join()
            shared.master.grad = waiting.pop(shared.master)

    def _portions(self) -> list[list[_SharedMaster]]:
        """What is updated at a time; at least one portion, which may be empty."""
        if not _counts_steps_per_parameter(self.optimizer):
            return [self._shared]
        portions: list[list[_SharedMaster]] = [[]]
        room = PORTION
        for shared in self._shared:
            size = shared.master.numel()
            if portions[-1] and size > room:
                portions.append([])
                room = PORTION
            portions[-1].append(shared)
            room -= size
        return portions

    def _copy_main_params_to_model_params(self) -> None:
        self._split_and_release([shared for shared in self._shared if shared.in_memory])
        with self._fp32_parameters_only():
            super()._copy_main_params_to_model_params()

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        with self.masters_in_fp32(changed=True), torch.no_grad():
            super()._copy_model_params_to_main_params(state_dict)


def _counts_steps_per_parameter(inner: torch.optim.Optimizer | None) -> bool:
    """torch's optimizers do; fused ones of other libraries count the calls of `step` for each group of parameters."""
    return type(inner).__module__.startswith("torch.optim")


class _SharingFloat16Optimizer(_SharingOptimizer, Float16OptimizerWithFloat16Params):
    float16_groups: list[list[Tensor]]

    def _parameters_and_masters(self) -> list[tuple[Tensor, Tensor]]:
        if self.is_stub_optimizer:
            return []
        return _pairs(self.float16_groups, self.fp32_from_float16_groups)

    @contextlib.contextmanager
    def _fp32_parameters_only(self) -> Iterator[None]:
        groups, self.float16_groups = self.float16_groups, []
        try:
            yield
        finally:
            self.float16_groups = groups

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """See megatron-core; `sharded_state_dict` asks for it, too. Only within `masters_in_fp32`."""
        assert self._in_memory or not self._shared, "the masters are not in memory: use masters_in_fp32"
        return super().state_dict(is_loading)


class _SharingDistributedOptimizer(_SharingOptimizer, DistributedOptimizer):
    shard_fp32_from_float16_groups: list[list[Tensor]]

    def _parameters_and_masters(self) -> list[tuple[Tensor, Tensor]]:
        if self.is_stub_optimizer:
            return []
        return _pairs(self.shard_float16_groups, self.shard_fp32_from_float16_groups)

    @contextlib.contextmanager
    def _fp32_parameters_only(self) -> Iterator[None]:
        groups, self.shard_fp32_from_float16_groups = self.shard_fp32_from_float16_groups, []
        try:
            yield
        finally:
            self.shard_fp32_from_float16_groups = groups

    def gather_parameters(self) -> None:
        """With --overlap-param-gather the next forward pass does it."""
        if not self.is_stub_optimizer and not self.ddp_config.overlap_param_gather:
            for chunk in self.model_chunks:
                chunk.start_param_sync()

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        assert self._in_memory, "the masters are not in memory: use masters_in_fp32"
        return super()._get_main_param_and_optimizer_states(model_param)

    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        assert self._in_memory, "the masters are not in memory: use masters_in_fp32"
        super()._set_main_param_and_optimizer_states(model_param, tensors)


def _pairs(parameters: Sequence[Sequence[Tensor]], masters: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [
        pair
        for of_group in zip(parameters, masters, strict=True)
        for pair in zip(of_group[0], of_group[1], strict=True)
    ]
