"""Peak memory of activations, found by running one micro batch without data.

Formulas for activation memory hold for one architecture and one set of kernels. Here the model itself runs forward and
backward on fake tensors, which have shapes but no memory, while every allocation and every release is counted; whatever
the model's class does is thereby included, recomputation and the logits too.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from mindspeed_llm.tasks.losses.cross_entropy import cross_entropy_sum

BALANCED_EXPERTS = "mindspeed_balanced_experts"
"""Name of an experts implementation for plans: every expert gets the same number of tokens."""


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that were made under it and still live, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave out a storage that existed before (parameters, inputs)."""
        self._remember(tensor.untyped_storage(), counted=0)

    def keep(self, size: int) -> None:
        """Count `size` bytes that stay."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if id(storage) not in self._known:
                    self._remember(storage, counted=storage.nbytes())
        return result

    def _remember(self, storage: Any, counted: int) -> None:
        key = id(storage)

        def release(_: Any) -> None:
            self.live -= counted
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, release)
        self.keep(counted)


@dataclass(frozen=True, kw_only=True)
class ActivationPeak:
    """Bytes in one micro step of one rank: `alone` is the peak of activations; `with_gradients` the peak of activations
    and finished gradients together, which is less than the sum of the two, since gradients grow while activations go.
    """

    alone: int
    with_gradients: int


def activation_peak(
    model: PreTrainedModel, *, micro_batch: int, sequence: int, dtype: torch.dtype, gradient_itemsize: float
) -> ActivationPeak:
    """Run one micro step on fake tensors.

    Args:
        model: on the meta device, with recomputation already applied; it holds fake tensors afterwards.
        dtype: the compute dtype.
        gradient_itemsize: bytes that a rank keeps per element of a finished gradient.

    Raises:
        Exception: whatever the model raises where its steps depend on values, which fake tensors do not have.
    """
    alone, together = _LiveBytes(), _LiveBytes()

    def finish_gradient(parameter: torch.Tensor) -> None:
        # FSDP reduces a gradient as soon as it is complete and keeps this rank's shard of it.
        parameter.grad = None
        together.keep(round(parameter.numel() * gradient_itemsize))

    # torch logs a trace of its own for every operator that fails on fake tensors; the caller reports the failure.
    fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")
    level = fake_tensor_log.level
    fake_tensor_log.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            # `to_empty` under the mode gives fake tensors on the CPU; kernels are then chosen as there.
            model.to_empty(device="cpu")
            model.tie_weights()
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
            input_ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
            labels = torch.zeros(micro_batch, sequence, dtype=torch.int64)
            for tensor in [*model.parameters(), *model.buffers(), input_ids, labels]:
                alone.ignore(tensor)
                together.ignore(tensor)
            for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
                parameter.register_post_accumulate_grad_hook(finish_gradient)
            model.train()
            with alone, together:
                logits = model(input_ids=input_ids, use_cache=False).logits
                loss = cross_entropy_sum(logits, labels)
                del logits
                loss.backward()
    finally:
        fake_tensor_log.setLevel(level)
    return ActivationPeak(alone=alone.peak, with_gradients=together.peak)


def register_balanced_experts() -> None:
    """Make `BALANCED_EXPERTS` known to transformers.

    How many tokens an expert gets depends on values, so neither of transformers' implementations runs on fake tensors.
    """
    ALL_EXPERTS_FUNCTIONS.register(BALANCED_EXPERTS, _balanced_experts)


def _balanced_experts(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    chosen = top_k_index.shape[-1]
    tokens, width = hidden_states.shape
    per_expert = -(-tokens * chosen // self.num_experts)
    slots = torch.arange(per_expert * self.num_experts) % tokens
    up = self.gate_up_proj if self.has_gate else self.up_proj
    inputs = hidden_states[slots].view(self.num_experts, per_expert, width)
    hidden = torch.bmm(inputs, up if self.is_transposed else up.transpose(1, 2))
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    down = self.down_proj
    output = torch.bmm(hidden, down if self.is_transposed else down.transpose(1, 2)).reshape(-1, width)
    weights = top_k_weights.reshape(-1)[torch.arange(output.shape[0]) % (tokens * chosen)]
    output = output * weights.unsqueeze(-1)
    return output[: tokens * chosen].view(tokens, chosen, width).sum(dim=1).to(hidden_states.dtype)
