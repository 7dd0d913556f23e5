"""One optimizer step on megatron-core's schedules, and the loss without one.

The loss of a step is the sum over all targets of the global batch divided by their number: sums and counts travel to
the end of the schedule, and `finalize_model_grads` divides the gradients once, so that neither depends on the split.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mindspeed_llm.core.lora.local_learning import LocalUpdates, local_rules
from mindspeed_llm.core.lora.local_settings import local_settings
from mindspeed_llm.platform.device import current_device
from mindspeed_llm.training.objective import LOSS, Batch, NextToken, Objective
from mindspeed_llm.training.setup import TrainingModel

_TOKENS, _TARGETS = "tokens", "targets"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did, the same on every rank."""

    nll_sum: float
    """Sum of the negative log likelihoods of all targets of the global batch."""
    targets: int
    grad_norm: float
    """Before clipping; 0 where the step was skipped."""
    updated: bool
    """False where fp16 gradients overflowed."""
    num_zeros: int | None = None
    """Gradient elements that are zero, where they are counted."""
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """For each of the objective's metrics its sum over the global batch, and what to divide it by."""
    tokens: int = 0
    """Of the global batch's rows, padding included."""

    @property
    def loss(self) -> float:
        """Mean per target; NaN where there is none."""
        return self.nll_sum / self.targets if self.targets else float("nan")


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """What an evaluation found, the same on every rank."""

    loss_sum: float
    count: int
    """What `loss_sum` is divided by: targets, or pairs."""
    targets: int
    """Tokens that the loss is about."""
    metrics: Mapping[str, tuple[float, float]]
    """As in `StepResult`."""

    @property
    def loss(self) -> float:
        """The mean; NaN where there is none."""
        return self.loss_sum / self.count if self.count else float("nan")


@dataclass
class _Passed:
    """What the micro batches of a step hold, counted as they go by: rows may be of any length."""

    tokens: int = 0
    targets: list[Tensor] = field(default_factory=list)

    def through(self, batches: list[Iterator[Batch]]) -> list[Iterator[Batch]]:
        """`batches`; of those of the first chunk, which are the others', too, note is taken."""
        return [self._noted(batches[0]), *batches[1:]]

    def _noted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.tokens += batch["tokens"].numel()
            self.targets.append((batch["loss_mask"] > 0).sum())
            yield batch


class TrainStep:
    """Runs steps of one model towards an objective."""

    def __init__(self, model: TrainingModel, args: Namespace, objective: Objective | None = None) -> None:
        self._model, self._args = model, args
        self._objective = objective or NextToken()
        self._schedule = get_forward_backward_func()
        self._local = local_settings(args)
        ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._local_updates = LocalUpdates(local_rules(model.modules), ranks)
        config = model.config
        self._has_router_losses = bool(
            config.num_moe_experts and (config.moe_aux_loss_coeff or config.moe_z_loss_coeff is not None)
        )

    def run(self, batches: list[Iterator[Batch]]) -> StepResult:
        """Train on the micro batches of one global batch.

        Args:
            batches: for each chunk of this rank an iterator over the same micro batches.
        """
        model = self._model
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        model.optimizer.zero_grad()
        count, passed = get_num_microbatches(), _Passed()
        batches = passed.through(batches)
        if self._has_router_losses:
            batches = self._weigh_router_losses(batches, count)
        self._local_updates.begin()
        reported = self._forward_backward(batches, forward_only=False, count=count)
        updated, grad_norm, num_zeros = model.optimizer.step()
        # All ranks of a pipeline must agree: only some may have seen an overflow, or a norm.
        updated = _least(updated)
        self._update_locally(updated)
        if updated:
            model.scheduler.step(increment=self._args.global_batch_size)
        sums = _sum_over_data_and_stages(reported, (LOSS, *self._objective.metrics), passed)
        total, targets = sums.pop(LOSS)
        tokens, _ = sums.pop(_TOKENS)[1], sums.pop(_TARGETS)
        return StepResult(
            nll_sum=total,
            targets=round(targets),
            tokens=round(tokens),
            metrics=sums,
            grad_norm=_largest(grad_norm or 0.0),
            updated=updated,
            num_zeros=None if num_zeros is None else int(num_zeros),
        )

    def _update_locally(self, updated: bool) -> None:
        """What the step's forward passes teach layers with local updates; nothing where the step is skipped."""
        if self._local is None or not updated:
            self._local_updates.drop()
            return
        # The schedule's shape; a stage may have no parameter in the optimizer that would say the rate.
        rate = self._local.rate * self._model.scheduler.get_lr({}) / self._model.scheduler.max_lr
        self._local_updates.apply(rate_of_a=rate, rate_of_b=rate * self._local.ratio)

    def evaluate(self, batches: list[Iterator[Batch]], *, count: int) -> EvalResult:
        """The loss of `count` micro batches of each data-parallel rank."""
        chunks, passed = self._model.chunks, _Passed()
        for chunk in chunks:
            chunk.eval()
        with torch.no_grad():
            reported = self._forward_backward(passed.through(batches), forward_only=True, count=count)
        for chunk in chunks:
            chunk.train()
        sums = _sum_over_data_and_stages(reported, (LOSS, *self._objective.metrics), passed)
        total, divisor = sums.pop(LOSS)
        targets, _ = sums.pop(_TARGETS)[1], sums.pop(_TOKENS)
        return EvalResult(loss_sum=total, count=round(divisor), targets=round(targets), metrics=sums)

    def _weigh_router_losses(self, batches: list[Iterator[Batch]], count: int) -> list[Iterator[Batch]]:
        """Tell the routers what the step's gradients will be divided by per token; gives the micro batches of the step.

        One number for the whole step: a forward pass that is computed again while a later micro batch is at work must
        find the same.
        """
        held = [[next(own) for _ in range(count)] for own in batches]
        divisor = torch.stack([self._objective.count(batch) for batch in held[0]]).sum()
        tokens = sum(batch["tokens"].numel() for batch in held[0])
        sums = torch.stack((divisor.float(), torch.tensor(tokens, dtype=torch.float32, device=divisor.device)))
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        total, of_tokens = sums.tolist()
        self._model.config.router_loss_scale = total / of_tokens
        return [iter(own) for own in held]

    def _forward_backward(self, batches: list[Iterator[Batch]], *, forward_only: bool, count: int) -> list[dict]:
        batches = self._objective.prepare(batches, count)
        return self._schedule(
            forward_step_func=self._objective.forward_step,
            data_iterator=batches if len(self._model.chunks) > 1 else batches[0],
            model=list(self._model.chunks),
            num_microbatches=count,
            seq_length=self._args.seq_length,
            micro_batch_size=self._args.micro_batch_size * self._objective.rows_per_sample,
            decoder_seq_length=self._args.seq_length,
            forward_only=forward_only,
        )


def _sum_over_data_and_stages(
    reported: list[dict[str, Tensor]], names: tuple[str, ...], passed: _Passed
) -> dict[str, tuple[float, float]]:
    """For each name its sum and its count over all micro batches and data-parallel ranks; only last stages have any.

    The counts of `_TOKENS` and `_TARGETS` are those of `passed`.
    """
    own = torch.zeros(len(names), 2, dtype=torch.float64, device="cpu")
    for entry in reported:
        own += torch.stack([entry[name].double().cpu() for name in names])
    # Every stage has seen all micro batches; the last one speaks for them.
    seen = [passed.tokens, int(sum(passed.targets))] if reported else [0, 0]
    own = torch.cat((own, torch.tensor([[0, count] for count in seen], dtype=torch.float64)))
    names = (*names, _TOKENS, _TARGETS)
    # float64 is not everywhere on accelerators; fp32 holds the mean's digits and counts up to 16M: split the count.
    split = torch.stack((own[:, 0], own[:, 1] // 4096, own[:, 1] % 4096), dim=1)
    values = split.to(device=current_device(), dtype=torch.float32)
    dist.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())
    sums = values.tolist()
    return {name: (total, high * 4096 + low) for name, (total, high, low) in zip(names, sums, strict=True)}


def _least(value: bool) -> bool:
    flag = torch.tensor([int(value)], dtype=torch.int32, device=current_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=parallel_state.get_model_parallel_group())
    return bool(flag.item())


def _largest(value: float) -> float:
    # The largest of a number and of one that is none may be either; a stage without anything to train has 0.
    is_none = value != value
    values = torch.tensor([0.0 if is_none else value, float(is_none)], dtype=torch.float32, device=current_device())
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=parallel_state.get_model_parallel_group())
    largest, none_somewhere = values.tolist()
    return float("nan") if none_somewhere else largest
