"""Rows of the tests of preference optimisation, and their faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any
from unittest import mock

import numpy as np

from mindspeed_llm.fsdp2.data.pairs import Pair, PairCollator
from mindspeed_llm.fsdp2.data.sample import Collator, Sample, shifted
from mindspeed_llm.fsdp2.models import adapters
from mindspeed_llm.fsdp2.models.model_factory import ModelFactory
from mindspeed_llm.fsdp2.optim.loss_scaler import LossScaler
from mindspeed_llm.fsdp2.optim.optimizer_factory import OptimizerFactory
from mindspeed_llm.fsdp2.train import preference
from mindspeed_llm.fsdp2.train.evaluate import evaluate
from mindspeed_llm.fsdp2.train.step import OptimizerStep
from mindspeed_llm.tasks.losses import preference as losses
from tests.distributed.rows import full_weights
from tests.fsdp2.train.rows import CPU, build

Side = tuple[list[int], list[int]]
PairOfSides = tuple[Side, Side]


def batch_of(pairs: list[PairOfSides]) -> dict[str, Any]:
    """One micro batch; an empty list gives a pair that only fills up."""
    rows = [Pair(*(Sample(np.array(ids), shifted(np.array(labels))) for ids, labels in pair)) for pair in pairs]
    return PairCollator(Collator(pad_token_id=0))(rows or [None])


def steps(
    *, folder: str, plan: list[list[list[list[PairOfSides]]]], sections: dict[str, Any], mutant: str | None = None
) -> dict[str, Any]:
    """Run optimizer steps; `plan[step][rank]` lists this rank's micro batches.

    Returns the results, the evaluation of the last step's pairs afterwards, and the weights on rank 0.
    """
    with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        config, mesh, built = build(folder, sections)
        reference = None
        if config.needs_reference:
            reference = ModelFactory.create_reference(config, mesh=mesh, device=CPU)
        pairs = preference.pair_loss(config.training, reference)
        built.model.train()
        step = OptimizerStep(
            model=built.model,
            sharded=built.sharded,
            optimizer=OptimizerFactory.create(built.model, config.training),
            mesh=mesh,
            device=CPU,
            config=config.training,
            scaler=LossScaler(enabled=False),
            pairs=pairs,
        )
        results = []
        for of_ranks in plan:
            batches = [batch_of(micro) for micro in of_ranks[mesh.rank]]
            result = step.run(batches, learning_rate=config.training.lr)
            results.append(asdict(result) | {"loss": result.loss})
        evaluated = evaluate(built.model, batches, device=CPU, pairs=pairs)
        weights = full_weights(built)
        frozen = {} if reference is None else full_weights(reference)
    only = mesh.rank == 0
    return {
        "results": results,
        "evaluated": asdict(evaluated),
        "weights": weights if only else {},
        "reference": frozen if only else {},
    }


@contextlib.contextmanager
def adapters_stay_on() -> Iterator[None]:
    """A fault: the reference is the policy of the moment."""
    with mock.patch.object(adapters, "adapters_off", lambda model: contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def sides_swapped() -> Iterator[None]:
    """A fault: the rejected sides are taken for the chosen ones."""
    original = losses.preference_loss

    def swapped(**given: Any) -> Any:
        other = {"chosen": "rejected", "rejected": "chosen"}
        names = {name: "_".join(other.get(word, word) for word in name.split("_")) for name in given}
        return original(**{names[name]: value for name, value in given.items()})

    with mock.patch.object(losses, "preference_loss", swapped):
        yield


@contextlib.contextmanager
def token_0_has_no_probability() -> Iterator[None]:
    """A fault: label 0 is taken for no label."""
    original = preference.reply_log_probs
    with mock.patch.object(
        preference, "reply_log_probs", lambda logits, labels: original(logits, labels.masked_fill(labels == 0, -100))
    ):
        yield


@contextlib.contextmanager
def mean_of_means() -> Iterator[None]:
    """A fault: a pair counts by the size of its micro batch."""
    original = preference.PairLoss.forward

    def scaled(self: Any, model: Any, batch: Any, **options: Any) -> Any:
        result = original(self, model, batch, **options)
        return preference.MicroBatchLoss(
            nll_sum=result.nll_sum / max(self.count(batch), 1) * 1.5, aux_loss=None, metrics=result.metrics
        )

    with mock.patch.object(preference.PairLoss, "forward", scaled):
        yield


MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    function.__name__: function
    for function in (adapters_stay_on, sides_swapped, token_0_has_no_probability, mean_of_means)
}
