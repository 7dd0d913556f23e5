"""Direct preference optimisation: one micro batch of pairs through the policy and the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
from mindspeed_llm.fsdp2.models.model_factory import BuiltModel
from mindspeed_llm.fsdp2.train.forward import Batch, MicroBatchLoss, model_inputs
from mindspeed_llm.tasks.losses.cross_entropy import IGNORE_INDEX
from mindspeed_llm.tasks.losses.preference import PreferenceOptions, pair_weights, paired_loss, reply_log_probs


class PairLoss:
    """Takes the place of `forward_loss` and `count_targets` where a batch holds pairs: the upper half of its rows are
    the chosen sides, the lower half the rejected ones (`PairCollator`), and the loss is a mean over pairs.
    """

    def __init__(self, options: PreferenceOptions, reference: BuiltModel | None) -> None:
        """`reference` None: the policy has adapters, and is the reference without them."""
        self._options, self._reference = options, reference
        if reference is not None:
            reference.model.requires_grad_(False)
            reference.model.eval()

    def count(self, batch: Batch) -> int:
        """The pairs of a micro batch; rows that only fill up have no target."""
        return int(pair_weights((batch["labels"] != IGNORE_INDEX).sum(dim=-1)).sum())

    def forward(
        self, model: PreTrainedModel, batch: Batch, *, device: torch.device, with_aux_loss: bool = False
    ) -> MicroBatchLoss:
        """Run a micro batch through both and sum the losses of its pairs."""
        labels = batch["labels"].to(device, non_blocking=True)
        # Before the policy, whose activations then need not wait in memory while the reference runs.
        reference = self._reference_log_probs(model, batch, labels, device)
        output = model(**model_inputs(batch, device, with_aux_loss=with_aux_loss), use_cache=False)
        policy = reply_log_probs(output.logits, labels)
        result, weights = paired_loss(policy, reference, self._options)
        return MicroBatchLoss(
            nll_sum=(result.losses * weights).sum(),
            aux_loss=output.aux_loss if with_aux_loss else None,
            metrics=result.sums(weights),
        )

    @torch.no_grad()
    def _reference_log_probs(
        self, policy: PreTrainedModel, batch: Batch, labels: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        inputs = model_inputs(batch, device)
        if self._reference is None:
            with _without_adapters(policy):
                return reply_log_probs(policy(**inputs, use_cache=False).logits, labels).log_probs
        model = self._reference.model
        log_probs = reply_log_probs(model(**inputs, use_cache=False).logits, labels).log_probs
        if self._reference.sharded.reshard_after_forward:
            # The head waits for a backward that does not come.
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return log_probs


def pair_loss(config: TrainingConfig, reference: BuiltModel | None) -> PairLoss | None:
    """The loss of stage dpo, None for another stage."""
    if config.stage != "dpo":
        return None
    options = PreferenceOptions(
        loss_type=config.dpo_loss_type,
        beta=config.dpo_beta,
        label_smoothing=config.dpo_label_smoothing,
        pref_ftx=config.pref_ftx,
    )
    return PairLoss(options, reference)


@contextlib.contextmanager
def _without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before training: adapters and dropout off."""
    from mindspeed_llm.fsdp2.models.adapters import adapters_off  # PEFT takes a while to import

    was_training = model.training
    model.eval()
    with adapters_off(model):
        yield
    model.train(was_training)
