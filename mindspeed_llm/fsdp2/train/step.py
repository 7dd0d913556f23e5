"""One optimizer step: micro batches, gradient reduction, clipping, update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
from mindspeed_llm.fsdp2.distributed.fsdp import ShardedModel, reduce_replicated_gradients, set_micro_step
from mindspeed_llm.fsdp2.distributed.mesh import DataMesh
from mindspeed_llm.fsdp2.optim.clip import clip_factor, gradient_norm, scale_gradients
from mindspeed_llm.fsdp2.optim.loss_scaler import LossScaler
from mindspeed_llm.fsdp2.train.forward import Batch, forward_loss
from mindspeed_llm.fsdp2.train.preference import PairLoss
from mindspeed_llm.tasks.losses.cross_entropy import count_targets
from mindspeed_llm.tasks.losses.preference import METRICS


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did, the same on every rank.

    `nll_sum` and `targets` are over the whole global batch; for pairs the one is the sum of their losses, the other
    their number, and `metrics` are further means over them. `aux_loss` is the mean over micro batches and ranks;
    `grad_norm` is before clipping; `updated` is False where the step was skipped (no target in the whole batch, or an
    fp16 overflow). `signals` are the sums over the ranks of what each passed in.
    """

    nll_sum: float
    targets: int
    samples: int
    tokens: int
    aux_loss: float | None
    grad_norm: float
    updated: bool
    signals: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean negative log likelihood per target, or mean loss per pair."""
        return self.nll_sum / self.targets if self.targets else 0.0


class OptimizerStep:
    """Runs optimizer steps; holds what does not change between them."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer,
        mesh: DataMesh,
        device: torch.device,
        config: TrainingConfig,
        scaler: LossScaler,
        pairs: PairLoss | None = None,
    ) -> None:
        """`pairs`: the loss of micro batches of pairs; None: cross entropy."""
        self._pairs = pairs
        self._model, self._sharded, self._optimizer = model, sharded, optimizer
        self._mesh, self._device, self._config, self._scaler = mesh, device, config, scaler
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def run(self, micro_batches: Sequence[Batch], *, learning_rate: float, signals: Sequence[int] = ()) -> StepResult:
        """Train on this rank's micro batches of one global batch.

        The loss of a micro batch is its sum over targets divided by the targets of the whole global batch. FSDP
        averages gradients over the data ranks, hence the factor of their number.
        """
        targets, samples, tokens, *signal_sums = self._sum_over_ranks(micro_batches, signals)
        aux_coefficient = self._config.router_aux_loss_coef
        nll_sum = torch.zeros((), dtype=torch.float32, device=self._device)
        aux_sum = torch.zeros((), dtype=torch.float32, device=self._device)
        metric_sums = torch.zeros(len(METRICS) if self._pairs else 0, dtype=torch.float32, device=self._device)
        forward = self._pairs.forward if self._pairs else forward_loss
        for position, batch in enumerate(micro_batches):
            set_micro_step(self._sharded, is_last=position == len(micro_batches) - 1)
            result = forward(self._model, batch, device=self._device, with_aux_loss=aux_coefficient > 0)
            loss = result.nll_sum * (self._mesh.size / max(targets, 1))
            # Rows that only fill up the last global batch of an epoch must not teach the router.
            if result.aux_loss is not None:
                weight = (1.0 if batch["num_samples"] else 0.0) / len(micro_batches)
                loss = loss + result.aux_loss * (aux_coefficient * weight)
                aux_sum += result.aux_loss.detach() * weight
            (loss * self._scaler.factor).backward()
            nll_sum += result.nll_sum.detach()
            if self._pairs:
                metric_sums += torch.stack([result.metrics[name] for name in METRICS])
        reduce_replicated_gradients(self._sharded, self._mesh.size)

        sums = torch.cat([torch.stack([nll_sum, aux_sum]), metric_sums])
        dist.all_reduce(sums)
        nll, aux, *of_pairs = sums.tolist()
        norm, updated = self._update(learning_rate, has_targets=targets > 0)
        return StepResult(
            nll_sum=nll,
            targets=targets,
            samples=samples,
            tokens=tokens,
            aux_loss=aux / self._mesh.size if aux_coefficient > 0 else None,
            grad_norm=norm,
            updated=updated,
            signals=tuple(signal_sums),
            metrics=dict(zip(METRICS, (total / max(targets, 1) for total in of_pairs), strict=False)),
        )

    def _sum_over_ranks(self, micro_batches: Sequence[Batch], signals: Sequence[int]) -> list[int]:
        """Targets (or pairs), samples and tokens of the global batch, then the sums of `signals`: one message for all
        of them.
        """
        if self._pairs:
            targets = sum(self._pairs.count(batch) for batch in micro_batches)
        else:
            targets = sum(int(count_targets(batch["labels"])) for batch in micro_batches)
        samples = sum(batch["num_samples"] for batch in micro_batches)
        tokens = sum(batch["num_tokens"] for batch in micro_batches)
        mine = torch.tensor([targets, samples, tokens, *signals], dtype=torch.int64)
        dist.all_reduce(mine)
        return mine.tolist()

    def _update(self, learning_rate: float, *, has_targets: bool) -> tuple[float, bool]:
        group = self._mesh.shard_group if self._mesh.shards > 1 else None
        norm = gradient_norm(self._parameters, group) / self._scaler.factor
        value = norm.item()
        finite = math.isfinite(value)
        # Without a target there is no gradient to follow; momentum and weight decay alone would still move the weights.
        updated = has_targets and (finite or not self._scaler.enabled)
        if updated:
            factor = 1.0 / self._scaler.factor
            if self._config.max_grad_norm > 0:
                factor = clip_factor(norm, self._config.max_grad_norm) * factor
            if not isinstance(factor, float) or factor != 1.0:
                scale_gradients(self._parameters, factor)
            for param_group in self._optimizer.param_groups:
                param_group["lr"] = learning_rate
            self._optimizer.step()
        self._scaler.update(overflow=not finite)
        self._optimizer.zero_grad(set_to_none=True)
        return value, updated
