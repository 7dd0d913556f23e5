"""Deliberate faults of the training step; each must make the parity of a row fail."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tests.core.overlapped_mutants import chunk_after_chunk


@contextlib.contextmanager
def mean_of_means() -> Iterator[None]:
    """Each micro batch counts alike, however many targets it has."""
    from mindspeed_llm.training import objective

    def loss(loss_mask: Any, losses: Any) -> Any:
        total, count, report = original(loss_mask, losses)
        return total / count.clamp(min=1), torch.ones_like(count), report

    original = objective.token_loss
    with mock.patch.object(objective, "token_loss", loss):
        yield


@contextlib.contextmanager
def padding_in_the_softmax() -> Iterator[None]:
    """Rows of the embedding without a token have logits."""
    from mindspeed_llm.core.gpt_model import LlmGptModel

    with mock.patch.object(LlmGptModel, "_without_padding", lambda self, module, inputs, output: output):
        yield


@contextlib.contextmanager
def norms_not_summed() -> Iterator[None]:
    """Under sequence parallelism each rank's gradient of a norm's weight stays alone."""
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    with mock.patch.object(finalize_model_grads, "_allreduce_non_tensor_model_parallel_grads", lambda *_: None):
        yield


@contextlib.contextmanager
def embedding_not_summed() -> Iterator[None]:
    """The first and the last stage of a tied model go different ways."""
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")

    with mock.patch.object(finalize_model_grads, "_allreduce_word_embedding_grads", lambda *_: None):
        yield


@contextlib.contextmanager
def no_data_parallel_sum() -> Iterator[None]:
    """Data-parallel ranks do not add their gradients up."""
    from megatron.core.distributed import DistributedDataParallel

    with mock.patch.object(DistributedDataParallel, "finish_grad_sync", lambda *_, **__: None):
        yield


@contextlib.contextmanager
def batched_messages() -> Iterator[None]:
    """Two stages send each other two messages at once, and gloo mixes them up."""
    from mindspeed_llm.tasks.models import config

    original = config._parallelism

    def parallelism(*arguments: Any) -> dict[str, Any]:
        return original(*arguments) | {"overlap_p2p_comm": False, "batch_p2p_comm": True}

    with mock.patch.object(config, "_parallelism", parallelism):
        yield


@contextlib.contextmanager
def router_losses_by_tokens() -> Iterator[None]:
    """As if every token of a step had a target."""
    from mindspeed_llm.training.train_step import TrainStep

    with mock.patch.object(TrainStep, "_weigh_router_losses", lambda _, batches, count: batches):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    function.__name__: function
    for function in (
        mean_of_means,
        padding_in_the_softmax,
        norms_not_summed,
        embedding_not_summed,
        no_data_parallel_sum,
        batched_messages,
        chunk_after_chunk,
        router_losses_by_tokens,
    )
}
