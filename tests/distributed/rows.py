"""Rows that run on the rank pool: training a toy through the package's own model factory and optimizer step."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mindspeed_llm.fsdp2.checkpoint.hf_export import export_model
from mindspeed_llm.fsdp2.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizationConfig,
    ParallelConfig,
    TrainingConfig,
)
from mindspeed_llm.fsdp2.distributed.mesh import build_mesh
from mindspeed_llm.fsdp2.models.model_factory import BuiltModel, ModelFactory
from mindspeed_llm.fsdp2.optim.loss_scaler import LossScaler
from mindspeed_llm.fsdp2.optim.optimizer_factory import OptimizerFactory
from mindspeed_llm.fsdp2.train.step import OptimizerStep
from mindspeed_llm.platform import distributed
from mindspeed_llm.tasks.losses.cross_entropy import shift_labels
from tests.distributed.mutants import MUTANTS
from tests.support.reference import RECIPE, Trace, collate, make_samples


def toy_config(folder: str, **sections: dict[str, Any]) -> Config:
    """A configuration with the recipe of the parity tests; `sections` override single fields."""
    training = {
        "output_dir": str(Path(folder).parent / "output"),
        "lr": RECIPE["lr"],
        "adam_epsilon": RECIPE["eps"],
        "min_lr": 0.0,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "per_device_train_batch_size": 8,
    }
    return Config(
        model=ModelConfig(model_name_or_path=folder, **sections.get("model", {})),
        data=DataConfig(**sections.get("data", {})),
        parallel=ParallelConfig(**{"param_dtype": "fp32", **sections.get("parallel", {})}),
        training=TrainingConfig(**{**training, **sections.get("training", {})}),
        optimization=OptimizationConfig(**sections.get("optimization", {})),
    )


def full_weights(built: BuiltModel) -> dict[str, torch.Tensor]:
    """All weights of the model, whole (a collective), under the names of transformers' state dict."""
    state = built.model.state_dict()
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().cpu()
        for name, tensor in state.items()
    }


def train(
    *,
    folder: str,
    samples: list[tuple[list[int], list[int]]],
    steps: int,
    sections: dict[str, dict[str, Any]] | None = None,
    mutant: str | None = None,
    count_collectives: bool = False,
    sum_only: bool = False,
) -> dict[str, Any]:
    """Train the toy in `folder` and return {"trace", "collectives" (per step), "updated"}; the trace's weights on
    rank 0.
    """
    config = toy_config(folder, **(sections or {}))
    average = mock.patch.object(distributed, "averages_in_collectives", lambda: not sum_only)
    with average, MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        return _train(config, samples, steps, count_collectives)


def _train(
    config: Config, samples: list[tuple[list[int], list[int]]], steps: int, count_collectives: bool
) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    training = config.training
    world = dist.get_world_size()
    mesh = build_mesh(world_size=world, fsdp_size=config.parallel.resolved_fsdp_size(world))
    device = torch.device("cpu")
    built = ModelFactory.create(config, mesh=mesh, device=device)
    built.model.train()
    step = OptimizerStep(
        model=built.model,
        sharded=built.sharded,
        optimizer=OptimizerFactory.create(built.model, training),
        mesh=mesh,
        device=device,
        config=training,
        scaler=LossScaler(enabled=config.parallel.param_dtype == "fp16"),
    )
    rank, micro = mesh.rank, training.per_device_train_batch_size
    accumulation = training.gradient_accumulation_steps
    global_batch = micro * accumulation * world
    trace, collectives, updated = Trace(), [], []
    for k in range(steps):
        batches = []
        for m in range(accumulation):
            start = k * global_batch + (m * world + rank) * micro
            chosen = samples[start : start + micro]
            batch: dict[str, Any] = collate(chosen)
            batch["labels"] = shift_labels(batch["labels"])
            batch["num_samples"] = len(chosen)
            batch["num_tokens"] = int(batch["attention_mask"].sum())
            batches.append(batch)
        with _counted() if count_collectives else contextlib.nullcontext(Counter()) as counter:
            result = step.run(batches, learning_rate=training.lr)
        trace.losses.append(result.loss)
        trace.grad_norms.append(result.grad_norm)
        collectives.append(dict(counter))
        updated.append(result.updated)
    weights = full_weights(built)
    trace.weights = weights if rank == 0 else {}
    return {"trace": trace, "collectives": collectives, "updated": updated}


def export(*, folder: str, output: str, sections: dict[str, dict[str, Any]], train_step: bool = True) -> None:
    """Build the model, run one optimizer step with learning rate 0 and export it to `output`."""
    config = toy_config(folder, **sections)
    training = config.training
    world = dist.get_world_size()
    mesh = build_mesh(world_size=world, fsdp_size=config.parallel.resolved_fsdp_size(world))
    built = ModelFactory.create(config, mesh=mesh, device=torch.device("cpu"))
    if train_step:
        step = OptimizerStep(
            model=built.model,
            sharded=built.sharded,
            optimizer=OptimizerFactory.create(built.model, training),
            mesh=mesh,
            device=torch.device("cpu"),
            config=training,
            scaler=LossScaler(enabled=False),
        )
        samples = make_samples(count=2 * world, vocabulary=13)
        batch: dict[str, Any] = collate(samples[2 * mesh.rank : 2 * mesh.rank + 2])
        batch |= {"labels": shift_labels(batch["labels"]), "num_samples": 2, "num_tokens": 64}
        assert step.run([batch], learning_rate=0.0).updated
    export_model(
        built.model,
        Path(output),
        config=built.source_config,
        dtype_of=built.export_dtype,
        shard_size=training.hf_shard_size,
        is_writer=mesh.rank == 0,
    )
    dist.barrier()


def initial_weights(*, folder: str, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Weights and buffers right after building; what `train_from_scratch` or a load gives."""
    config = toy_config(folder, **sections)
    world = dist.get_world_size()
    mesh = build_mesh(world_size=world, fsdp_size=config.parallel.resolved_fsdp_size(world))
    built = ModelFactory.create(config, mesh=mesh, device=torch.device("cpu"))
    buffers = {name: buffer.clone() for name, buffer in built.model.named_buffers()}
    return {"weights": full_weights(built), "buffers": buffers}


@contextlib.contextmanager
def _counted() -> Iterator[Counter]:
    """Count every collective that reaches the process groups, by the name of its c10d operator."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counter: Counter = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace in ("c10d", "_c10d_functional"):
                counter[func._schema.name.split("::")[1].strip("_")] += 1
            return func(*args, **(kwargs or {}))

    with Count():
        yield counter
