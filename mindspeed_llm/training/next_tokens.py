"""The next tokens of texts by a model on megatron-core, through the schedule of its pipeline and without backward.

All data-parallel ranks compute the same rows: ranks with different experts have to be in step. One of them says what
the tokens are, since in low precision the others may round differently.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from mindspeed_llm.platform.device import current_device
from mindspeed_llm.tasks.inference.greedy import NO_TOKEN, padded
from mindspeed_llm.training.setup import TrainingModel

_STEP = 64
"""Tokens that the length of a batch is a multiple of, so that it does not change with every token."""

_Batch = tuple[Tensor, Tensor]
"""Tokens [rows, length], and the place of the last one of each row [rows]."""


class PipelineNextTokens:
    """Finds next tokens, see `tasks.inference.greedy.NextTokens`, in whatever mode the model is."""

    def __init__(self, model: TrainingModel, args: Namespace) -> None:
        self._model, self._args = model, args

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """See `NextTokens`."""
        length = self._length(max(map(len, rows)))
        batches = self._micro_batches(rows, length)
        chunks = list(self._model.chunks)
        iterators = [iter(batches) for _ in chunks]
        found: list[tuple[Tensor, Tensor]] = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, self._args.vocab_size),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks,
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=self._args.micro_batch_size,
            decoder_seq_length=length,
            forward_only=True,
            collect_non_loss_data=True,
        )
        tokens = torch.zeros(len(batches) * self._args.micro_batch_size, dtype=torch.int32, device=current_device())
        if found:  # on the last stage
            tokens.copy_(_best_of_shards(*(torch.cat(parts) for parts in zip(*found, strict=True))))
        return _of_one_rank(tokens, is_source=bool(found)).tolist()[: len(rows)]

    def _length(self, longest: int) -> int:
        parts = self._args.tensor_model_parallel_size if self._args.sequence_parallel else 1
        step = math.lcm(_STEP, parts)
        # The length of training is one that all ranks can share, and has positions.
        return min(-(-longest // step) * step, self._args.seq_length)

    def _micro_batches(self, rows: Sequence[Sequence[int]], length: int) -> list[_Batch]:
        """The rows in micro batches of training's size, as many as the schedule can take; the first row fills up."""
        size = self._args.micro_batch_size
        count = -(-len(rows) // size)
        if len(self._model.chunks) > 1:
            group = self._model.config.microbatch_group_size_per_vp_stage
            count = -(-count // group) * group
        filled = [*rows, *[rows[0]] * (count * size - len(rows))]
        device = current_device()
        return [
            (
                padded(filled[first : first + size], length).to(device),
                torch.tensor([len(row) - 1 for row in filled[first : first + size]], device=device),
            )
            for first in range(0, len(filled), size)
        ]


def _forward_step(vocab_size: int, batches: Iterator[_Batch], model: nn.Module) -> tuple[Tensor, Any]:
    tokens, last = next(batches)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)

    def best(logits: Tensor, non_loss_data: bool) -> tuple[Tensor, Tensor]:
        logits = logits[torch.arange(len(last), device=last.device), last]
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        return best_of_shard(logits, first, vocab_size)

    return model(tokens, positions, None), best


def best_of_shard(logits: Tensor, first: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and its token (NO_TOKEN where the logit is no finite number). What only fills up
    the embedding is no token.

    Args:
        logits: of this rank's part of the padded vocabulary, [rows, part].
        first: the token that the part begins with.
        vocab_size: tokens that there are.
    """
    if first + logits.shape[-1] > vocab_size:
        logits = logits.clone()
        logits[:, max(vocab_size - first, 0) :] = -torch.inf
    values, places = logits.float().max(dim=-1)
    return values, (places + first).masked_fill(~values.isfinite(), NO_TOKEN)


def _best_of_shards(values: Tensor, tokens: Tensor) -> Tensor:
    """Of the tokens that ranks found in their parts of the vocabulary the one with the largest logit, [rows]; of equal
    ones the first.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return tokens
    of_ranks = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(of_ranks, values, group=group)
    tokens_of_ranks = [torch.empty_like(tokens) for _ in range(group.size())]
    dist.all_gather(tokens_of_ranks, tokens, group=group)
    best = torch.stack(of_ranks).argmax(dim=0)
    return torch.stack(tokens_of_ranks).gather(0, best[None])[0]


def _of_one_rank(tokens: Tensor, *, is_source: bool) -> Tensor:
    """The tokens that the first of the ranks with the output layer found, on all ranks."""
    first = parallel_state.get_data_parallel_rank() == parallel_state.get_tensor_model_parallel_rank() == 0
    if not (is_source and first):
        tokens.zero_()
    dist.all_reduce(tokens)
    return tokens
