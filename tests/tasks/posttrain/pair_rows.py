"""Rows that run on the rank pool: preference optimisation of a toy, step by step."""

from __future__ import annotations

import contextlib
import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.tasks.posttrain.pairs import FIRST_OF_SHARDS
from tests.tasks.posttrain.rows import _batches, _running


def train(*, argv: list[str], steps: int, mutant: str | None = None) -> dict[str, Any]:
    """Train on the pairs that the flags name, as `rows.train` does; also the means of the metrics in each step, those
    of an evaluation of the last step's pairs behind it, and whether the reference is a second model.
    """
    with _running(argv) as (args, task), MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        from megatron.core import parallel_state

        from mindspeed_llm.core.lora.attach import adapter_parameters
        from mindspeed_llm.training.checkpointing import load_checkpoint
        from mindspeed_llm.training.folders import hf_directory
        from mindspeed_llm.training.setup import build_training_model, complete_weights
        from mindspeed_llm.training.train_step import TrainStep

        task.check_data(args)
        model = build_training_model(args, hf_weights=hf_directory(args))
        if args.lora_load:
            load_checkpoint(args, model)
        objective = task.objective(args, model)
        step = TrainStep(model, args, objective)
        batches = _batches(args, task)
        losses, norms, metrics, counts = [], [], [], []
        for _ in range(steps):
            micro = list(itertools.islice(batches, args.num_microbatches))
            result = step.run([iter(micro) for _ in model.chunks])
            losses.append(result.loss)
            norms.append(result.grad_norm)
            counts.append(result.targets)
            metrics.append(_means(result.metrics))
        evaluated = step.evaluate([iter(micro) for _ in model.chunks], count=len(micro)).metrics
        with complete_weights(model):
            states = [
                {name: value.detach().clone() for name, value in named.items() if value is not None}
                for module in model.modules
                for named in [adapter_parameters(module) if args.lora_load else module.state_dict()]
            ]
        place = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        return {
            "losses": losses,
            "grad_norms": norms,
            "counts": counts,
            "router_loss_scale": model.config.router_loss_scale,
            "metrics": metrics,
            "evaluated": _means(evaluated),
            "is_copy": objective._reference.chunks is not model.chunks,
            "states": states,
            "place": place,
            "args": args,
        }


def reference_weights(*, argv: list[str], saved: list[str], step: int | None, iteration: int) -> dict[str, Any]:
    """Save the policy of `--load` as the checkpoint of `step`, and take it as the reference of one whose weights are
    other ones; whether all are equal bit for bit, or the error.

    Args:
        argv: of the run; `saved` are flags of the one that saves.
        iteration: how far the run with the reference is.
    """
    from mindspeed_llm.errors import UserError

    with _running(argv) as (args, task):
        from mindspeed_llm.training.checkpointing import save_checkpoint
        from mindspeed_llm.training.data.datasets import Progress
        from mindspeed_llm.training.setup import build_training_model
        from mindspeed_llm.training.state import TrainState

        model = build_training_model(args, hf_weights=Path(args.load))
        if step is not None:
            folder, form = saved
            save_args = Namespace(**{**vars(args), "save": folder, "ckpt_format": form})
            save_checkpoint(save_args, model, TrainState(iteration=step))
        before = [{name: value.clone() for name, value in _tensors(module)} for module in model.modules]
        with torch.no_grad():
            for module in model.modules:
                for parameter in module.parameters():
                    parameter.add_(1)
        try:
            progress = Progress(iteration=iteration, consumed_samples=4 * iteration) if iteration else None
            chunks = task.objective(args, model, progress)._reference.chunks
        except UserError as error:
            return {"error": str(error), "equal": None}
        equal = [
            dict(_tensors(chunk)).keys() == own.keys()
            and all(value.equal(own[name]) for name, value in _tensors(chunk))
            for chunk, own in zip(chunks, before, strict=True)
        ]
        return {"error": None, "equal": equal, "grad": any(p.requires_grad for c in chunks for p in c.parameters())}


def _tensors(module: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)]


def _means(sums: Any) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sums.items()}


@contextlib.contextmanager
def adapters_stay_on() -> Iterator[None]:
    """A fault: the reference has the adapters of the policy."""
    from mindspeed_llm.tasks.posttrain import reference

    with mock.patch.object(reference, "without_adapters", lambda chunks: contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def sides_swapped() -> Iterator[None]:
    """A fault: rejected rows come first."""
    from mindspeed_llm.tasks.posttrain import pair_batches

    with mock.patch.object(pair_batches, "SIDES", ("rejected", "chosen")):
        yield


@contextlib.contextmanager
def first_of_shards_do_not_count() -> Iterator[None]:
    """A fault: targets that are the first token of a part of the vocabulary are taken for padding."""
    from mindspeed_llm.tasks.posttrain import pair_batches

    original = pair_batches.instruction_batch

    def changed(*words: Any, **named: Any) -> Any:
        batch = original(*words, **named)
        is_first = torch.isin(batch["labels"], torch.tensor(FIRST_OF_SHARDS))
        return batch | {"loss_mask": torch.where(is_first, 0.0, batch["loss_mask"])}

    with mock.patch.object(pair_batches, "instruction_batch", changed):
        yield


@contextlib.contextmanager
def means_per_token() -> Iterator[None]:
    """A fault: replies are compared by means per token."""
    from mindspeed_llm.tasks.posttrain import preference

    original = preference.replies

    def changed(*words: Any) -> Any:
        found = original(*words)
        return found._replace(log_probs=found.log_probs / found.lengths.clamp(min=1))

    with mock.patch.object(preference, "replies", changed):
        yield


@contextlib.contextmanager
def reference_moves() -> Iterator[None]:
    """A fault: the reference is the policy as it is now."""
    from mindspeed_llm.tasks.posttrain import reference

    def policy(args: Any, model: Any, progress: Any) -> Any:
        return reference.Reference(model.chunks)

    with mock.patch.object(reference, "build_reference", policy):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    function.__name__: function
    for function in (
        adapters_stay_on,
        sides_swapped,
        first_of_shards_do_not_count,
        means_per_token,
        reference_moves,
    )
}
