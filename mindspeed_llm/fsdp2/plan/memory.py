"""Memory that one rank needs, part by part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.distributed.fsdp import DTYPES, module_groups
from mindspeed_llm.fsdp2.distributed.modules import find_modules
from mindspeed_llm.fsdp2.distributed.recompute import apply_recompute
from mindspeed_llm.fsdp2.plan.activations import ActivationPeak, activation_peak

_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank.

    weights: the fp32 shards, those of a reference model included. gradients: those of what is trained. optimizer:
    AdamW's two fp32 moments of the same. gathered: whole weights of the groups that are in use at once. in_flight:
    whole gradients of groups on their way to being reduced, or, with gradient accumulation, of the whole model.
    activations: one micro batch; None where the model could not be traced.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    in_flight: int
    activations: ActivationPeak | None

    @property
    def peak(self) -> int:
        """Largest memory of a training step, in bytes, without what the allocator and the libraries hold besides.

        Less than the sum of the parts: most activations are gone by the time that most gradients are there.
        """
        growing = self.activations.with_gradients if self.activations else self.gradients
        return self.weights + self.optimizer + self.gathered + self.in_flight + max(growing, self.gradients)


def plan_memory(model: PreTrainedModel, config: Config, *, shards: int) -> tuple[MemoryPlan, str | None]:
    """Estimate the peak of a training step.

    Args:
        model: on the meta device, as it will be trained but neither sharded nor set up for recomputation yet; it holds
            fake tensors afterwards.
        shards: ranks that share one copy of the model.

    Returns:
        The plan, and the reason where activations are unknown.
    """
    parallel, training = config.parallel, config.training
    compute, reduce = DTYPES[parallel.param_dtype], DTYPES[parallel.reduce_dtype]
    ignored = find_modules(model, parallel.ignored_modules or (), field="parallel.ignored_modules").values()
    replicated = _numel(ignored)
    total = sum(parameter.numel() for parameter in model.parameters())
    local = -(-(total - replicated) // shards) + replicated
    modules = module_groups(model, parallel)
    groups = [_numel(group) for group in modules]
    root = total - replicated - sum(groups)
    trained_replicated, trained_groups = _trained(ignored), [_trained(group) for group in modules]
    trained = _trained([model])
    trained_local = -(-(trained - trained_replicated) // shards) + trained_replicated
    trained_root = trained - trained_replicated - sum(trained_groups)
    gathered = _gathered(groups, root, config)
    in_flight = _in_flight(trained_groups, trained_root, trained, config)
    if parallel.recompute:
        apply_recompute(find_modules(model, parallel.recompute_modules, field="parallel.recompute_modules"))
    reason = None
    try:
        activations = activation_peak(
            model,
            # A pair has two rows.
            micro_batch=training.per_device_train_batch_size * (2 if training.stage == "dpo" else 1),
            sequence=config.data.cutoff_len,
            dtype=compute,
            gradient_itemsize=_FP32_BYTES * trained_local / trained,
        )
    except Exception as error:  # any operator of any model may refuse; the plan then says so and leaves the part out
        activations, reason = None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    plan = MemoryPlan(
        # The reference is taken to be as large as the model.
        weights=local * (2 if config.needs_reference else 1) * _FP32_BYTES,
        gradients=trained_local * _FP32_BYTES,
        optimizer=2 * trained_local * _FP32_BYTES,
        gathered=gathered * compute.itemsize,
        in_flight=in_flight * _in_flight_bytes(compute, reduce, training.gradient_accumulation_steps),
        activations=activations,
    )
    return plan, reason


def _gathered(groups: Sequence[int], root: int, config: Config) -> int:
    """Parameters that are whole at once: everything, or the root's and those of a window of groups."""
    if not config.parallel.reshard_after_forward:
        return sum(groups) + root
    ahead = max(config.parallel.num_to_forward_prefetch, config.parallel.num_to_backward_prefetch)
    window = max((sum(groups[i : i + 1 + ahead]) for i in range(len(groups))), default=0)
    return window + root


def _in_flight(groups: Sequence[int], root: int, total: int, config: Config) -> int:
    if config.training.gradient_accumulation_steps > 1:
        return total
    return max([*groups, root])


def _in_flight_bytes(compute: torch.dtype, reduce: torch.dtype, accumulation: int) -> int:
    if accumulation > 1:
        return reduce.itemsize
    # The gradient as computed, and its copy in the layout and dtype of the reduction.
    return compute.itemsize + reduce.itemsize


def _numel(modules: Iterable[nn.Module]) -> int:
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in parameters)


def _trained(modules: Iterable[nn.Module]) -> int:
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
