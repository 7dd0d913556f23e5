"""Deliberate faults, each a patch of the one function that holds a rule of numbers; parity must fail with any of
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import torch


@contextlib.contextmanager
def mean_of_means() -> Iterator[None]:
    """Every micro batch divides by its own targets instead of those of the global batch."""
    from mindspeed_llm.fsdp2.train import forward, step

    def scaled(model, batch, **options):
        result = forward.forward_loss(model, batch, **options)
        targets = max(int((batch["labels"] != -100).sum()), 1)
        return forward.MicroBatchLoss(nll_sum=result.nll_sum / targets * scaled.mean, aux_loss=result.aux_loss)

    scaled.mean = 30.0
    with mock.patch.object(step, "forward_loss", scaled):
        yield


@contextlib.contextmanager
def unshifted_labels() -> Iterator[None]:
    """Each position predicts itself."""
    from tests.distributed import rows

    with mock.patch.object(rows, "shift_labels", lambda labels: labels):
        yield


@contextlib.contextmanager
def padded_row_in_the_loss() -> Iterator[None]:
    """Padding positions get token 0 as a target."""
    from mindspeed_llm.fsdp2.train import forward

    def with_padding(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="sum")

    with mock.patch.object(forward, "cross_entropy_sum", with_padding):
        yield


@contextlib.contextmanager
def no_shard_reduction() -> Iterator[None]:
    """Every rank keeps its own gradient of its shard; nothing is added up over the ranks that share the model."""
    import torch.distributed as dist

    def own_part(output: torch.Tensor, input: torch.Tensor, *args: object, **options: object) -> None:
        group = options["group"]
        output.copy_(input.chunk(group.size())[group.rank()])

    with (
        mock.patch.object(dist, "reduce_scatter_tensor", own_part),
        mock.patch.object(dist, "reduce_scatter_single", own_part, create=True),
    ):
        yield


@contextlib.contextmanager
def no_replica_reduction() -> Iterator[None]:
    """HSDP without the all-reduce over the replicas."""
    import torch.distributed as dist

    original = dist.all_reduce

    def small_ones_only(tensor: torch.Tensor, *args: object, **options: object) -> object:
        # The package's own all-reduces carry a few numbers, FSDP's carry gradients.
        return original(tensor, *args, **options) if tensor.numel() <= 8 else None

    with mock.patch.object(dist, "all_reduce", small_ones_only):
        yield


@contextlib.contextmanager
def local_gradient_norm() -> Iterator[None]:
    """Every rank clips by the norm of its own shards."""
    from mindspeed_llm.fsdp2.train import step

    original = step.gradient_norm
    with mock.patch.object(step, "gradient_norm", lambda parameters, group: original(parameters, None)):
        yield


@contextlib.contextmanager
def swapped_gate_and_up() -> Iterator[None]:
    """The parts of a concatenated expert weight are read in the wrong order."""
    from mindspeed_llm.fsdp2.checkpoint import hf_names
    from mindspeed_llm.fsdp2.checkpoint.weight_files import Concatenated

    with mock.patch.object(hf_names, "Concatenated", lambda parts, dim: Concatenated(parts[::-1], dim)):
        yield


@contextlib.contextmanager
def expert_order() -> Iterator[None]:
    """The experts are stacked in the wrong order."""
    from mindspeed_llm.fsdp2.checkpoint import hf_names
    from mindspeed_llm.fsdp2.checkpoint.weight_files import Stacked

    with mock.patch.object(hf_names, "Stacked", lambda parts, dim: Stacked(parts[::-1], dim)):
        yield


@contextlib.contextmanager
def wrong_shard_offset() -> Iterator[None]:
    """Every rank reads the first rows of a weight."""
    from mindspeed_llm.fsdp2.checkpoint import hf_load

    original = hf_load.local_slices

    def first_rows(tensor: torch.Tensor) -> tuple[slice, ...]:
        return tuple(slice(0, part.stop - part.start) for part in original(tensor))

    with mock.patch.object(hf_load, "local_slices", first_rows):
        yield


@contextlib.contextmanager
def norms_decay() -> Iterator[None]:
    """Weight decay on norm weights too."""
    from mindspeed_llm.fsdp2.optim import optimizer_factory

    original = optimizer_factory._parameter_groups

    def everything(model, config):
        # A strong decay: with the recipe's own the difference would drown in the tolerance within few steps.
        return [{**group, "weight_decay": 10.0} for group in original(model, config)]

    with mock.patch.object(optimizer_factory, "_parameter_groups", everything):
        yield


@contextlib.contextmanager
def segments_see_each_other() -> Iterator[None]:
    """The positions that keep packed samples apart get lost."""
    from mindspeed_llm.fsdp2.train import step

    original = step.forward_loss
    lost = mock.patch.object(
        step,
        "forward_loss",
        lambda model, batch, **options: original(model, {**batch, "position_ids": None}, **options),
    )
    with lost:
        yield


@contextlib.contextmanager
def fillers_teach_the_router() -> Iterator[None]:
    """Rows that only fill up the last global batch count in the router's loss."""
    from mindspeed_llm.fsdp2.train import step

    original = step.OptimizerStep.run

    def everything_counts(self, batches, **options):
        return original(self, [{**batch, "num_samples": 1} for batch in batches], **options)

    with mock.patch.object(step.OptimizerStep, "run", everything_counts):
        yield


@contextlib.contextmanager
def router_sees_padding() -> Iterator[None]:
    """The router's loss is computed over padding too."""
    from mindspeed_llm.fsdp2.train import step

    original = step.forward_loss
    lost = mock.patch.object(
        step,
        "forward_loss",
        lambda model, batch, **options: original(model, {**batch, "attention_mask": None}, **options),
    )
    with lost:
        yield


@contextlib.contextmanager
def eval_mean_of_means() -> Iterator[None]:
    """Evaluation averages the losses of its batches."""
    from mindspeed_llm.fsdp2.train import evaluate, forward

    def averaged(model, batch, **options):
        result = forward.forward_loss(model, batch, **options)
        return forward.MicroBatchLoss(nll_sum=result.nll_sum / max(averaged.count(batch["labels"]), 1), aux_loss=None)

    averaged.count = lambda labels: int((labels != -100).sum())
    one_per_batch = mock.patch.object(evaluate, "count_targets", lambda labels: (labels != -100).any())
    with mock.patch.object(evaluate, "forward_loss", averaged), one_per_batch:
        yield


MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    function.__name__: function
    for function in (
        mean_of_means,
        unshifted_labels,
        padded_row_in_the_loss,
        no_shard_reduction,
        no_replica_reduction,
        local_gradient_norm,
        swapped_gate_and_up,
        expert_order,
        wrong_shard_offset,
        norms_decay,
        segments_see_each_other,
        fillers_teach_the_router,
        router_sees_padding,
        eval_mean_of_means,
    )
}
