"""Rows that run on the rank pool: training adapters on a toy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.core.lora.mutants import MUTANTS
from tests.support.reference import make_samples
from tests.support.toys import VOCABULARY
from tests.training.checkpointing.rows import hash_of, logged
from tests.training.rows import micro_batches, running

Saves = Sequence[tuple[int, str, str]]
"""(step after which to save, format, folder)"""


def train(
    *,
    folder: str,
    flags: list[str],
    steps: int,
    values: dict[str, Any] | None = None,
    saves: Saves = (),
    mutant: str | None = None,
) -> dict[str, Any]:
    """Train the adapters of the toy in `folder` up to step `steps`; `values` are arguments to set by name.

    Returns per step losses and gradient norms; this rank's gradients of the first step and adapters after the last one,
    by chunk and key; hashes of all else that a checkpoint holds before and after; how many elements gradients and the
    optimizer's state have; what was logged; or `error`.
    """
    with MUTANTS[mutant](), logged() as lines, running(folder, flags, values or {}) as args:
        from megatron.core import parallel_state

        from mindspeed_llm.checkpoints.storage import CheckpointError
        from mindspeed_llm.core.lora.attach import adapter_parameters
        from mindspeed_llm.errors import UserError
        from mindspeed_llm.training.checkpointing import check_adapter_export, load_checkpoint, save_checkpoint
        from mindspeed_llm.training.folders import check_folders, hf_directory
        from mindspeed_llm.training.setup import build_training_model, complete_weights
        from mindspeed_llm.training.state import TrainState
        from mindspeed_llm.training.train_step import TrainStep

        samples = make_samples(count=64, vocabulary=VOCABULARY)
        place = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        result: dict[str, Any] = {"args": args, "place": place, "error": None, "losses": [], "grad_norms": []}
        result["log"] = lines
        try:
            check_folders(args)
            weights = hf_directory(args)
            model = build_training_model(args, hf_weights=weights)
            goes_on = (args.load and weights is None) or args.lora_load
            state = (load_checkpoint(args, model) if goes_on else None) or TrainState()
            if args.save_lora_to_hf:
                check_adapter_export(args, model)
        except (UserError, CheckpointError) as error:
            result["error"] = f"{type(error).__name__}: {error}"
            return result
        result["start"] = state.iteration
        result["frozen"] = [_frozen(module) for module in model.modules]
        result["begun"] = [_copies(adapter_parameters(module)) for module in model.modules]
        step = TrainStep(model, args)
        while state.iteration < steps:
            micro = micro_batches(samples[state.consumed_train_samples :], args, 0)
            if state.iteration == 0:
                result["gradients"] = []
                done = _keeping_gradients(step, micro, model, result["gradients"])
            else:
                done = step.run([iter(micro) for _ in model.chunks])
            state.iteration += 1
            state.consumed_train_samples += args.global_batch_size
            result["losses"].append(done.loss)
            result["grad_norms"].append(done.grad_norm)
            for number, kind, target in saves:
                if number == state.iteration:
                    args.ckpt_format, args.save = kind, target
                    try:
                        save_checkpoint(args, model, state)
                    except (UserError, CheckpointError) as error:
                        result["error"] = f"{type(error).__name__}: {error}"
                        return result
        with complete_weights(model):
            result["states"] = [_copies(adapter_parameters(module)) for module in model.modules]
            result["frozen_after"] = [_frozen(module) for module in model.modules]
        result["sizes"] = _sizes(model)
        return result


def _keeping_gradients(step: Any, micro: list[Any], model: Any, kept: list[dict[str, Tensor]]) -> Any:
    """A step; the gradients as the optimizer finds them."""
    from mindspeed_llm.core.lora.attach import adapter_parameters

    optimizer = model.optimizer
    original = optimizer.step

    def stepping() -> Any:
        kept.extend(
            {name: each.main_grad.clone() for name, each in adapter_parameters(module).items() if each.requires_grad}
            for module in model.modules
        )
        return original()

    optimizer.step = stepping
    try:
        return step.run([iter(micro) for _ in model.chunks])
    finally:
        del optimizer.step


def _copies(parameters: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _frozen(module: torch.nn.Module) -> dict[str, str]:
    """Parameters and buffers that are not the adapters'."""
    from mindspeed_llm.core.lora.attach import adapter_parameters

    adapters = adapter_parameters(module)
    return {
        name: hash_of(value.detach())
        for name, value in module.state_dict().items()
        if name not in adapters and value is not None
    }


def _sizes(model: Any) -> dict[str, int]:
    """Elements on this rank."""
    from mindspeed_llm.core.lora.attach import adapter_parameters
    from mindspeed_llm.core.shared_master import optimizer_parts
    from mindspeed_llm.training.checkpointing import optimizer_state

    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    states = [state for part in optimizer_parts(model.optimizer) for state in part.optimizer.state.values()]
    return {
        "adapters": sum(p.numel() for module in model.modules for p in adapter_parameters(module).values()),
        "all": sum(p.numel() for module in model.modules for p in module.parameters()),
        "gradients": sum(buffer.grad_data.numel() for buffer in buffers),
        "moments": sum(state[name].numel() for state in states for name in optimizer_state.MOMENTS if name in state),
    }


def logits(*, folder: str, flags: list[str], lora: list[str]) -> dict[str, Tensor]:
    """The logits of this rank for some tokens: of the model, of it with adapters, and of that without them."""
    from tests.tasks.models.sessions import run_schedule

    ids = torch.arange(3, 67).view(2, 32)
    found: dict[str, Tensor] = {}
    for name, words in (("model", flags), ("adapted", [*flags, *lora])):
        with running(folder, words, {}) as args:
            from mindspeed_llm.core.lora.attach import without_adapters
            from mindspeed_llm.training.checkpointing import load_checkpoint
            from mindspeed_llm.training.setup import build_training_model

            model = build_training_model(args, hf_weights=Path(folder))
            if args.lora_load:
                load_checkpoint(args, model)
            modules = [module.eval() for module in model.modules]
            found[name] = torch.cat(run_schedule(modules, args, ids))
            if name == "adapted":
                with without_adapters(modules):
                    found["without"] = torch.cat(run_schedule(modules, args, ids))
                found["again"] = torch.cat(run_schedule(modules, args, ids))
    return found
