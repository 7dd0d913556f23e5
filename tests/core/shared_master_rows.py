"""Rows: training in bf16 with `--reuse-fp32-param`, and the same with torch's own optimizer on fp32 masters."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mindspeed_llm.platform import distributed
from tests.core.shared_master_mutants import MUTANTS
from tests.training.rows import micro_batches, running

# The last bits of a norm depend on the order of its sum, and clipping puts them into every weight.
RUN = {"clip_grad": 0.0, "deterministic_mode": True}


def half_up(master: Tensor) -> Tensor:
    """fp32 -> bf16 by integers: 0x8000 more, without the lower 16 bits."""
    bits = master.numpy().view("uint32").astype("uint64")
    return torch.from_numpy(((bits + 0x8000) >> 16).astype("uint16").view("int16")).view(torch.bfloat16)


def train(
    *, folder: str, samples: list[Any], steps: int, flags: list[str], portion: int, mutant: str | None = None
) -> dict[str, Any]:
    """Losses, bf16 weights and fp32 masters of this rank (shards of them with the distributed optimizer): of a run with
    the flag, and of the reference.
    """
    with running(folder, ["--bf16", "--reuse-fp32-param", *flags], RUN) as args:
        from mindspeed_llm.core import shared_master
        from mindspeed_llm.training.setup import complete_weights
        from mindspeed_llm.training.train_step import TrainStep

        model = _model(args, folder)
        places = _places(model)
        losses = []
        with mock.patch.object(shared_master, "PORTION", portion), MUTANTS[mutant]():
            step = TrainStep(model, args)
            for number in range(steps):
                micro = micro_batches(samples, args, number)
                losses.append(step.run([iter(micro) for _ in model.chunks]).loss)
            with complete_weights(model), shared_master.masters_in_fp32(model.optimizer):
                parameters = dict(model.modules[0].named_parameters())
                weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
                masters = {name: parameters[name].main_param.detach().clone() for name in places}
        reference = _reference(args, folder, samples, steps)
        reference["masters"] = {
            name: reference["masters"][name].view(-1)[place].view_as(masters[name]) for name, place in places.items()
        }
        return {"found": {"losses": losses, "weights": weights, "masters": masters}, "reference": reference}


def _model(args: Any, folder: str) -> Any:
    from mindspeed_llm.training.setup import build_training_model

    return build_training_model(args, hf_weights=Path(folder))


def _places(model: Any) -> dict[str, slice]:
    """The elements of each parameter whose masters this rank has."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    (part,) = model.optimizer.chained_optimizers
    found = {}
    for name, parameter in model.modules[0].named_parameters():
        if not isinstance(part, DistributedOptimizer):
            found[name] = slice(None)
        elif parameter in part.model_param_gbuf_map:
            place = part._get_model_param_range_map(parameter)["param"]
            found[name] = slice(place.start, place.end)
    return found


def _reference(args: Any, folder: str, samples: list[Any], steps: int) -> dict[str, Any]:
    """megatron-core computes the gradients; the update is torch's, and the cast that of integers."""
    from mindspeed_llm.training.train_step import TrainStep

    args.reuse_fp32_param = args.use_distributed_optimizer = False
    args.overlap_grad_reduce = args.overlap_param_gather = False
    model = _model(args, folder)
    step = TrainStep(model, args)
    parameters = dict(model.modules[0].named_parameters())
    masters = {name: parameter.detach().float() for name, parameter in parameters.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in masters.values() if m.ndim > 1], "weight_decay": args.weight_decay},
            {"params": [m for m in masters.values() if m.ndim == 1], "weight_decay": 0.0},
        ],
        lr=args.lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
    )
    losses = []
    for number in range(steps):
        micro = micro_batches(samples, args, number)
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        reported = step._forward_backward([iter(micro) for _ in model.chunks], forward_only=False, count=len(micro))
        total, targets = step_sums(reported)
        losses.append(total / targets)
        for name, parameter in parameters.items():
            masters[name].grad = parameter.main_grad.float()
        optimizer.step()
        for name, parameter in parameters.items():
            parameter.data.copy_(half_up(masters[name]))
    return {
        "losses": losses,
        "weights": {name: parameter.detach().clone() for name, parameter in parameters.items()},
        "masters": masters,
    }


def step_sums(reported: list[Any]) -> tuple[float, int]:
    """The loss of all ranks and its targets, as the step sums them."""
    from mindspeed_llm.training import train_step

    total, targets = train_step._sum_over_data_and_stages(reported, ("lm loss",))["lm loss"]
    return total, round(targets)


def num_bytes() -> int:
    """Of all tensors that Python knows of, each storage once."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def memory(*, folder: str, samples: list[Any], flags: list[str], portion: int) -> dict[str, int]:
    """Bytes of this rank's tensors between two steps, and the most while the inner optimizer updates."""
    with running(folder, ["--bf16", *flags], RUN) as args:
        from mindspeed_llm.core import shared_master
        from mindspeed_llm.training.train_step import TrainStep

        gc.collect()
        before = num_bytes()
        model = _model(args, folder)
        step, during = TrainStep(model, args), []
        (part,) = model.optimizer.chained_optimizers
        part.optimizer.register_step_post_hook(lambda *_: during.append(num_bytes() - before))
        with mock.patch.object(shared_master, "PORTION", portion):
            for number in range(2):
                micro = micro_batches(samples, args, number)
                step.run([iter(micro) for _ in model.chunks])
                del micro
        calls = len(during)
        model.optimizer.zero_grad()
        sizes = [master.numel() for master in part.get_parameters()]
        return {
            "between": num_bytes() - before,
            "during": max(during),
            "steps": calls,
            "masters": sum(sizes),
            "largest": max(sizes),
            "ranks": distributed.world_size(),
        }


def _to_the_middle(model: Any) -> None:
    """Masters whose two nearest bf16 are equally near; parameters follow by torch's cast, to the even one."""
    (part,) = model.optimizer.chained_optimizers
    for master in part.get_parameters():
        bits = master.view(torch.int32)
        bits.copy_(bits & ~0xFFFF | 0x8000)
    part._copy_main_params_to_model_params()
    for chunk in model.chunks:
        chunk.start_param_sync()


def interrupted(
    *,
    folder: str,
    samples: list[Any],
    flags: list[str],
    kind: str,
    target: str,
    shared: tuple[bool, bool],
    ties: bool = False,
    no_load_optim: bool = False,
    mutant: str | None = None,
) -> dict[str, Any]:
    """Two steps, a checkpoint, two more steps; and the two steps of a run that goes on from the checkpoint.

    Args:
        kind: the checkpoint's format.
        target: where to save.
        shared: whether the run that saves has the flag, and the one that loads.
        ties: put all masters in the middle between two bf16 before saving.
        no_load_optim: load weights only.
        mutant: a fault of the run that loads.
    """
    values = {"save": target, "load": target, "ckpt_format": kind, "no_load_optim": no_load_optim}
    with running(folder, ["--bf16", *flags], values) as args:
        from mindspeed_llm.core.shared_master import masters_in_fp32
        from mindspeed_llm.training.checkpointing import load_checkpoint, save_checkpoint
        from mindspeed_llm.training.setup import build_training_model, complete_weights
        from mindspeed_llm.training.state import TrainState
        from mindspeed_llm.training.train_step import TrainStep

        found: dict[str, Any] = {}
        state = TrainState()

        def note(model: Any, name: str) -> None:
            with complete_weights(model), masters_in_fp32(model.optimizer):
                parameters = dict(model.modules[0].named_parameters())
                masters = {key: parameters[key].main_param for key in parameters if key in places}
                found[f"{name} masters"] = {key: value.detach().clone() for key, value in masters.items()}
                found[f"{name} weights"] = {key: value.detach().clone() for key, value in parameters.items()}

        def train(model: Any, last: int) -> list[tuple[float, float]]:
            step, steps = TrainStep(model, args), []
            while state.iteration < last:
                micro = micro_batches(samples, args, state.iteration)
                done = step.run([iter(micro) for _ in model.chunks])
                state.iteration += 1
                state.consumed_train_samples += args.global_batch_size
                steps.append((done.loss, done.grad_norm))
            return steps

        args.reuse_fp32_param = shared[0]
        model = _model(args, folder)
        places = _places(model)
        train(model, 2)
        if ties:
            _to_the_middle(model)
        note(model, "saved")
        save_checkpoint(args, model, state)
        found["whole"] = train(model, 4)
        note(model, "whole")
        args.reuse_fp32_param = shared[1]
        model = build_training_model(args)
        with MUTANTS[mutant]():
            loaded = load_checkpoint(args, model)
        assert loaded is not None
        state.iteration, state.consumed_train_samples = loaded.iteration, loaded.consumed_train_samples
        note(model, "loaded")
        found["resumed"] = train(model, 4)
        note(model, "resumed")
        return found
