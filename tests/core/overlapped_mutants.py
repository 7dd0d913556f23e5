"""Deliberate faults of linear layers in chunks; each must make the comparison with megatron-core's layers fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


@contextlib.contextmanager
def chunk_after_chunk() -> Iterator[None]:
    """What is gathered stays in the order of its arrival: first chunk of all ranks, second chunk of all ranks."""
    from mindspeed_llm.core import overlapped_linears

    def gather_and_multiply(part: Tensor, matrix: Tensor, group: Any, num_chunks: int, **options: Any) -> Tensor:
        product = original(part, matrix, group, num_chunks, **options)
        by_rank = product.unflatten(0, (group.size(), -1))
        return torch.cat(
            [by_rank[:, rows].flatten(0, 1) for rows in overlapped_linears.chunks_of(len(part), num_chunks)]
        )

    original = overlapped_linears.gather_and_multiply
    with mock.patch.object(overlapped_linears, "gather_and_multiply", gather_and_multiply):
        yield


@contextlib.contextmanager
def rows_left_over() -> Iterator[None]:
    """Rows that the number of chunks does not divide are forgotten."""
    from mindspeed_llm.core import overlapped_linears

    def chunks_of(length: int, count: int) -> list[slice]:
        size = max(length // count, 1)
        return [slice(start, start + size) for start in range(0, min(length, size * count), size)]

    with mock.patch.object(overlapped_linears, "chunks_of", chunks_of):
        yield


@contextlib.contextmanager
def last_chunk_not_summed() -> Iterator[None]:
    """Of the last chunk each rank keeps its own product."""
    from mindspeed_llm.core import overlapped_linears

    def multiply_and_sum(whole: Tensor, matrix: Tensor, group: Any, num_chunks: int) -> Any:
        output, pending = of_sum(whole, matrix, group, num_chunks)
        for work, _ in pending:
            work.wait()
        last = overlapped_linears.chunks_of(len(whole), num_chunks)[-1]
        output[last] = whole[last] @ matrix
        return output, []

    def multiply_and_scatter(whole: Tensor, matrix: Tensor, group: Any, num_chunks: int) -> Any:
        output, pending = of_scatter(whole, matrix, group, num_chunks)
        for work, _ in pending:
            work.wait()
        last = overlapped_linears.chunks_of(len(output), num_chunks)[-1]
        output[last] = (whole @ matrix).unflatten(0, (group.size(), -1))[dist.get_rank(group), last]
        return output, []

    of_sum, of_scatter = overlapped_linears.multiply_and_sum, overlapped_linears.multiply_and_scatter
    with (
        mock.patch.object(overlapped_linears, "multiply_and_sum", multiply_and_sum),
        mock.patch.object(overlapped_linears, "multiply_and_scatter", multiply_and_scatter),
    ):
        yield


MUTANTS: dict[str | None, Callable[[], contextlib.AbstractContextManager[None]]] = {
    None: contextlib.nullcontext,
    **{function.__name__: function for function in (chunk_after_chunk, rows_left_over, last_chunk_not_summed)},
}
