"""Rows that run on the rank pool: training a toy on the Megatron backend with samples that the test hands over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.platform import distributed
from mindspeed_llm.training.initialize import initialize, shutdown
from tests.support.megatron_args import megatron_args
from tests.support.reference import RECIPE
from tests.training.mutants import MUTANTS

Sample = tuple[list[int], list[int]]
LENGTH = 64
GLOBAL_BATCH = 8
FLAGS = [
    *("--seq-length", str(LENGTH), "--micro-batch-size", "2", "--global-batch-size", str(GLOBAL_BATCH)),
    *("--train-iters", "8", "--lr", str(RECIPE["lr"]), "--min-lr", str(RECIPE["lr"]), "--lr-decay-style", "constant"),
    *("--adam-beta1", str(RECIPE["betas"][0]), "--adam-beta2", str(RECIPE["betas"][1])),
    *("--adam-eps", str(RECIPE["eps"]), "--weight-decay", str(RECIPE["weight_decay"])),
    *("--clip-grad", str(RECIPE["clip"]), "--use-flash-attn"),
]


@contextlib.contextmanager
def running(folder: str, flags: list[str], values: dict[str, Any]) -> Iterator[Any]:
    """The arguments of a run whose process groups and patches exist within the context, and are gone behind it."""
    world_size = distributed.world_size()
    args = megatron_args(Path(folder), world_size=world_size, flags=[*FLAGS, *flags], **values)
    features = FeaturesManager(FEATURES)
    initialize(args)
    try:
        features.apply(args)
        yield args
    finally:
        features.undo()
        shutdown()


def batch_of(samples: list[Sample], length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Samples as a Megatron batch: labels are those of the next token, positions without a target have mask 0."""
    tokens = torch.zeros(len(samples), length, dtype=torch.long)
    labels, mask = torch.zeros_like(tokens), torch.zeros(len(samples), length)
    for row, (ids, targets) in enumerate(samples):
        tokens[row, : len(ids)] = torch.tensor(ids)
        shifted = torch.tensor([*targets[1:], -100])
        labels[row, : len(ids)] = shifted.clamp(min=0)
        mask[row, : len(ids)] = (shifted != -100).float()
    positions = torch.arange(length).expand(len(samples), length)
    return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}


def micro_batches(samples: list[Sample], args: Any, step: int) -> list[dict[str, torch.Tensor]]:
    """This rank's micro batches of one step, in Megatron's order."""
    from megatron.core import parallel_state

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    micro = args.micro_batch_size
    first = step * args.global_batch_size + rank * micro
    starts = range(first, (step + 1) * args.global_batch_size, micro * size)
    return [batch_of(samples[start : start + micro]) for start in starts]


def train(
    *,
    folder: str,
    samples: list[Sample],
    steps: int,
    flags: list[str],
    values: dict[str, Any] | None = None,
    mutant: str | None = None,
) -> dict[str, Any]:
    """Train the toy in `folder`; gives losses, gradient norms, and this rank's weights after the last step with its
    place in the topology.
    """
    with running(folder, flags, values or {}) as args, MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        from megatron.core import parallel_state

        from mindspeed_llm.training.setup import build_training_model, complete_weights
        from mindspeed_llm.training.train_step import TrainStep

        model = build_training_model(args, hf_weights=Path(folder))
        step = TrainStep(model, args)
        losses, norms = [], []
        for number in range(steps):
            micro = micro_batches(samples, args, number)
            result = step.run([iter(micro) for _ in model.chunks])
            losses.append(result.loss)
            norms.append(result.grad_norm)
        with complete_weights(model):
            states = [
                {name: value.detach().clone() for name, value in module.state_dict().items() if value is not None}
                for module in model.modules
            ]
        place = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        return {"losses": losses, "grad_norms": norms, "states": states, "place": place, "args": args}


@contextlib.contextmanager
def _nothing_in_new_memory() -> Iterator[None]:
    """torch fills what it has not been told to fill with NaN."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def norm_of_weights(*, folder: str, flags: list[str]) -> float:
    """`--log-params-norm` of the toy in `folder`, whose parameters are no numbers until something is put into them."""
    with running(folder, flags, {}) as args, _nothing_in_new_memory():
        from mindspeed_llm.training.params_norm import params_norm
        from mindspeed_llm.training.setup import build_training_model

        return params_norm(build_training_model(args, hf_weights=Path(folder)))
