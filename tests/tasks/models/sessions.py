"""A model of the Megatron backend on the rank pool: its groups, its chunks, its schedule."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.platform import cuda_names

_built: list[nn.Module] = []
"""The chunks of the row that runs."""


@contextlib.contextmanager
def session(args: Namespace) -> Iterator[None]:
    """Everything that models need of megatron-core in this process, undone at the end."""
    cuda_names.install()
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    logging.getLogger(random.__name__).addFilter(_is_no_false_alarm)
    manager = FeaturesManager(FEATURES)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        )
        random.model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)
        manager.apply(args)
        try:
            yield
        finally:
            manager.undo()
    finally:
        parallel_state.destroy_model_parallel()
        random.initialize_rng_tracker(force_reset=True)
        forget_graphs(_built)
        _built.clear()
        # Both hold process groups, and with them threads.
        get_moe_layer_wise_logging_tracker().clear()
        RotaryEmbedding.forward.cache_clear()
        logging.getLogger(random.__name__).removeFilter(_is_no_false_alarm)
        cuda_names.uninstall()


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    # There is one generator here, and a context of the device's is for drawing from it.
    return "CPU RNG state changed" not in record.getMessage()


def forget_graphs(chunks: Sequence[nn.Module]) -> None:
    """Let go of what the dispatchers of experts keep of the last forward pass: its graph leads back to the model, by a
    way that Python's garbage collection does not see.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    for module in (module for chunk in chunks for module in chunk.modules()):
        for dispatcher in (held for held in vars(module).values() if isinstance(held, MoETokenDispatcher)):
            for name, value in vars(dispatcher).items():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(dispatcher, name, None)


def row(function: Callable[..., Any]) -> Callable[..., Any]:
    """A row that leaves no models behind: their process groups have threads, which go with the garbage."""

    @functools.wraps(function)
    def run(**arguments: Any) -> Any:
        try:
            return function(**arguments)
        finally:
            gc.collect()

    return run


def build(args: Namespace) -> list[nn.Module]:
    """The chunks of this rank."""
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.models.config import transformer_config
    from mindspeed_llm.tasks.models.provider import build_model

    config = transformer_config(args)
    count = args.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(count or 1):
        vp_stage = None if count is None else stage
        ends = [
            end(ignore_virtual=count is None, vp_stage=vp_stage)
            for end in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        ]
        chunks.append(build_model(args, config, pre_process=ends[0], post_process=ends[1], vp_stage=vp_stage))
    _built.extend(chunks)
    return chunks


def loaded(args: Namespace, folder: Path) -> list[nn.Module]:
    """The chunks of this rank with the weights in `folder`."""
    from mindspeed_llm.tasks.models.hf_weights import load_hf_weights

    chunks = build(args)
    load_hf_weights(chunks, folder, args)
    return chunks


def run_schedule(
    chunks: Sequence[nn.Module],
    args: Namespace,
    ids: Tensor,
    *,
    documents: Tensor | None = None,
    labels: Tensor | None = None,
) -> list[Any]:
    """Run megatron-core's schedule over the samples, in micro batches of `args.micro_batch_size`.

    Returns:
        on the last stage one element for each micro batch: without labels its logits [B, S, V of this rank]; with them
        its summed loss. The latter also runs the backward pass.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    micro, length = args.micro_batch_size, ids.shape[1]
    batches = [
        {
            "input_ids": ids[rows],
            "position_ids": torch.arange(length)[None],
            "attention_mask": None if documents is None else documents[rows],
            "labels": None if labels is None else labels[rows],
        }
        for rows in (slice(start, start + micro) for start in range(0, len(ids), micro))
    ]

    def forward_step(batch_iterator: Iterator[dict[str, Any]], model: nn.Module) -> tuple[Tensor, Any]:
        return model(**next(batch_iterator)), output_of

    def output_of(output: Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output.detach().clone()
        total = output.sum()
        return total, torch.tensor(output.numel(), dtype=torch.int), {"loss": total.detach()}

    iterators = [iter(batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=micro,
        forward_only=labels is None,
        collect_non_loss_data=labels is None,
    )


def own_part(whole: Tensor, width: int) -> Tensor:
    """This rank's columns of logits over the vocabulary, padded with minus infinity to `width` a rank."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    padding = torch.full((*whole.shape[:-1], width * size - whole.shape[-1]), -torch.inf)
    return torch.cat((whole, padding), dim=-1)[..., rank * width : (rank + 1) * width]
