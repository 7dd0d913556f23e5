"""Rows of the training tests that run on the rank pool."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mindspeed_llm.fsdp2.data.data_factory import DataBundle
from mindspeed_llm.fsdp2.distributed.mesh import DataMesh, build_mesh
from mindspeed_llm.fsdp2.models.model_factory import BuiltModel, ModelFactory
from mindspeed_llm.fsdp2.optim.loss_scaler import LossScaler
from mindspeed_llm.fsdp2.optim.optimizer_factory import OptimizerFactory
from mindspeed_llm.fsdp2.train import trainer
from mindspeed_llm.fsdp2.train.evaluate import evaluate
from mindspeed_llm.fsdp2.train.step import OptimizerStep
from mindspeed_llm.tasks.losses.cross_entropy import shift_labels
from tests.distributed.mutants import MUTANTS
from tests.distributed.rows import full_weights, toy_config
from tests.support.reference import collate

Samples = list[tuple[list[int], list[int]]]
CPU = torch.device("cpu")


def build(folder: str, sections: dict[str, Any]) -> tuple[Any, DataMesh, BuiltModel]:
    """Configuration, mesh over all ranks, and the model of `folder`."""
    config = toy_config(folder, **sections)
    world = dist.get_world_size()
    mesh = build_mesh(world_size=world, fsdp_size=config.parallel.resolved_fsdp_size(world))
    return config, mesh, ModelFactory.create(config, mesh=mesh, device=CPU)


def padded(samples: Samples) -> dict[str, Any]:
    """One micro batch; an empty list gives a row that only fills up."""
    batch: dict[str, Any] = collate(samples or [([0] * 8, [-100] * 8)])
    batch["labels"] = shift_labels(batch["labels"])
    return batch | {"num_samples": len(samples), "num_tokens": sum(len(ids) for ids, _ in samples)}


def packed(samples: Samples) -> dict[str, Any]:
    """All samples in one row, kept apart by their positions."""
    labels = [shift_labels(torch.tensor(labels)) for _, labels in samples]
    positions = [torch.arange(len(ids)) for ids, _ in samples]
    return {
        "input_ids": torch.tensor([[token for ids, _ in samples for token in ids]]),
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat(positions)[None],
        "attention_mask": None,
        "num_samples": len(samples),
        "num_tokens": sum(len(ids) for ids, _ in samples),
    }


def steps(
    *,
    folder: str,
    plan: list[list[list[Samples]]],
    sections: dict[str, Any],
    scale: float | None = None,
    as_packed: bool = False,
    mutant: str | None = None,
) -> dict[str, Any]:
    """Run optimizer steps; `plan[step][rank]` lists this rank's micro batches.

    Returns the results of all steps, the loss scale after each, and the weights after each on rank 0.
    """
    with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        config, mesh, built = build(folder, sections)
        built.model.train()
        scaler = LossScaler(enabled=scale is not None, scale=scale or 1.0)
        step = OptimizerStep(
            model=built.model,
            sharded=built.sharded,
            optimizer=OptimizerFactory.create(built.model, config.training),
            mesh=mesh,
            device=CPU,
            config=config.training,
            scaler=scaler,
        )
        make = packed if as_packed else padded
        results, scales, weights = [], [], []
        for of_ranks in plan:
            batches = [make(samples) for samples in of_ranks[mesh.rank]]
            result = step.run(batches, learning_rate=config.training.lr)
            results.append(asdict(result) | {"loss": result.loss})
            scales.append(scaler.factor)
            whole = full_weights(built)
            weights.append(whole if mesh.rank == 0 else {})
    return {"results": results, "scales": scales, "weights": weights}


def eval_loss(
    *, folder: str, batches: list[list[Samples]], sections: dict[str, Any], mutant: str | None = None
) -> dict[str, Any]:
    """Evaluate `batches[rank]` with a model in training mode."""
    with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        _, mesh, built = build(folder, sections)
        built.model.train()
        result = evaluate(built.model, [padded(samples) for samples in batches[mesh.rank]], device=CPU)
    gradients = [name for name, parameter in built.model.named_parameters() if parameter.grad is not None]
    return {
        "loss": result.loss,
        "tokens": result.tokens,
        "training": built.model.training and built.model.model.layers[0].training,
        "gradients": gradients,
    }


class _Source:
    """A training source of given batches."""

    def __init__(self, batches: list[list[dict[str, Any]]]) -> None:
        self._batches = batches
        self.num_samples = self.steps_per_epoch = len(batches)
        self.layouts: tuple[int, ...] = ()

    def total_steps(self, num_train_epochs: float, max_steps: int) -> int:
        return max_steps

    def micro_batches(self, start_step: int = 0) -> list[list[dict[str, Any]]]:
        return self._batches[start_step:]


class _Tokenizer:
    eos_token_id = 2


def train(
    *, folder: str, samples: Samples, sections: dict[str, Any], poison_step: int | None = None
) -> list[dict[str, Any]]:
    """Run the Trainer on one sample per step; in `poison_step` (from 1) the loss is NaN."""
    config, mesh, built = build(folder, sections)
    data = DataBundle(train=_Source([[padded([sample])] for sample in samples]), eval=None)
    run = trainer.Trainer(config, built=built, tokenizer=_Tokenizer(), data=data, mesh=mesh, device=CPU)
    original = run._step.run
    calls = []

    def poisoned(batches: Any, *, learning_rate: float, signals: Any) -> Any:
        calls.append(learning_rate)
        if len(calls) == poison_step:
            with torch.no_grad():
                built.model.model.norm.weight.fill_(float("nan"))
        return original(batches, learning_rate=learning_rate, signals=signals)

    with mock.patch.object(run._step, "run", poisoned):
        results = run.train()
    return [asdict(result) | {"loss": result.loss, "lr": lr} for result, lr in zip(results, calls, strict=True)]


def command(*, argv: list[str]) -> dict[str, Any]:
    """Run the command line up to the Trainer: the weights, and the logits of one batch in training mode, twice."""
    from mindspeed_llm.fsdp2 import main

    seen: dict[str, Any] = {}

    class Probe:
        def __init__(self, config: Any, *, built: BuiltModel, data: DataBundle, **_: Any) -> None:
            seen["weights"] = full_weights(built)
            batch = next(iter(data.train.micro_batches()))[0]
            seen["ids"] = batch["input_ids"]
            built.model.train()
            with torch.no_grad():
                ids = torch.arange(3, 43).reshape(2, 20)
                seen["logits"] = [built.model(input_ids=ids, use_cache=False).logits for _ in range(2)]

        def train(self) -> None:
            return

    with mock.patch.object(trainer, "Trainer", Probe):
        assert main.main(argv) == 0
    assert Path(argv[0]).exists()
    return seen
