"""A row that writes checkpoints as Megatron-LM does: with its calls, under its names, without a manifest."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import queue
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnBackend

from tests.support.reference import make_samples
from tests.training.rows import micro_batches, running


def write(*, folder: str, vocabulary: int, steps: int, flags: list[str], target: str, kind: str) -> list[Any]:
    """Train, save in `target`, and train as many steps again; returns the losses of those."""
    with running(folder, flags, {}) as args:
        from mindspeed_llm.training.setup import build_training_model
        from mindspeed_llm.training.train_step import TrainStep

        model = build_training_model(args, hf_weights=Path(folder))
        samples = make_samples(count=88, vocabulary=vocabulary, no_target_every=5)
        step, done = TrainStep(model, args), []
        for number in range(2 * steps):
            if number == steps:
                if kind == "torch":
                    _as_rank_files(args, model, steps, Path(target))
                else:
                    _as_sharded(args, model, steps, Path(target), kind)
            micro = micro_batches(samples, args, number)
            result = step.run([iter(micro) for _ in model.chunks])
            done.append((number + 1, result.loss, result.grad_norm))
        return done[steps:]


@contextlib.contextmanager
def _may_fork() -> Iterator[None]:
    """megatron-core forks processes to write, which ranks of the pool must not; and has results handed over by a
    process that would outlive the row.
    """
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    results: queue.Queue[Any] = queue.Queue()
    writer = "megatron.core.dist_checkpointing.strategies.filesystem_async._get_write_results_queue"
    with mock.patch.dict(settings, daemon=False), mock.patch(writer, lambda: results):
        yield


def _random_state() -> dict[str, Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def _common(args: Any, steps: int) -> dict[str, Any]:
    known = {name: value for name, value in vars(args).items() if isinstance(value, int | float | str | None)}
    known |= {
        "consumed_train_samples": steps * args.global_batch_size,
        "consumed_valid_samples": 0,
        # What Megatron's arguments hold besides plain values.
        "attention_backend": AttnBackend.auto,
        "params_dtype": torch.float32,
    }
    return {
        "args": argparse.Namespace(**known),
        "checkpoint_version": 3.0,
        "iteration": steps,
        "num_floating_point_operations_so_far": 1.5,
    }


def _as_rank_files(args: Any, model: Any, steps: int, target: Path) -> None:
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    path = target / f"iter_{steps:07d}" / f"mp_rank_{rank:02d}"
    path.mkdir(parents=True, exist_ok=True)
    state = _common(args, steps)
    state["model"] = model.modules[0].state_dict_for_save_checkpoint()
    state["optimizer"] = model.optimizer.state_dict()
    state["opt_param_scheduler"] = model.scheduler.state_dict()
    state["rng_state"] = [_random_state()]
    if args.use_distributed_optimizer:
        model.optimizer.save_parameter_state(str(path / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save(state, path / "model_optim_rng.pt")
    dist.barrier()
    (target / "latest_checkpointed_iteration.txt").write_text(str(steps))
    dist.barrier()


def _as_sharded(args: Any, model: Any, steps: int, target: Path, kind: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    together, apart = "together" in kind, "apart" in kind
    model.config.hetereogenous_dist_checkpoint = not together
    if together and model.config.num_moe_experts:
        model.config.moe_layer_freq = 1
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable" if "dp_reshardable" in kind else "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": apart,
    }
    path = target / f"iter_{steps:07d}"
    path.mkdir(parents=True, exist_ok=True)
    state = _common(args, steps)
    state["model"] = model.modules[0].sharded_state_dict(metadata=dict(metadata))
    state["optimizer"] = model.optimizer.sharded_state_dict(state, metadata=dict(metadata))
    state["opt_param_scheduler"] = model.scheduler.state_dict()
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    state["rng_state"] = ShardedObject(
        "rng_state",
        [_random_state()],
        (1, size),
        (0, rank),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    dist.barrier()
    with _may_fork():
        dist_checkpointing.save(state, str(path), content_metadata=metadata)
    (target / "latest_checkpointed_iteration.txt").write_text(str(steps))
    dist.barrier()


def read(*, folder: str, flags: list[str], source: str) -> dict[str, Any]:
    """Load the checkpoint `source` with megatron-core's own functions into a model with other weights; returns its
    weights, and what `common.pt` says.
    """
    with running(folder, flags, {}) as args:
        from megatron.core import dist_checkpointing

        from mindspeed_llm.training.checkpointing import optimizer_state
        from mindspeed_llm.training.setup import build_training_model
        from tests.training.checkpointing.rows import hash_of

        model = build_training_model(args)
        optimizer_state.allocate(model.optimizer)
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        wanted = {"model": model.modules[0].sharded_state_dict(metadata=dict(metadata))}
        wanted["optimizer"] = model.optimizer.sharded_state_dict(wanted, is_loading=True, metadata=dict(metadata))
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = dist_checkpointing.load(wanted, source)
        model.modules[0].load_state_dict(loaded["model"], strict=False)
        states = model.optimizer.chained_optimizers[0].optimizer.state.values()
        moments = {number: hash_of(state["exp_avg"]) for number, state in enumerate(states)}
        weights = {n: hash_of(v) for n, v in model.modules[0].state_dict().items() if v is not None}
        return {
            "weights": weights,
            "moments": moments,
            "iteration": loaded["iteration"],
            "samples": loaded["args"].consumed_train_samples,
            "version": loaded["checkpoint_version"],
        }
