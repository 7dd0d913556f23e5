"""Linear layers of tensor parallelism in chunks: each chunk's collective is on its way while the next is multiplied.

    column, sequence parallel    forward    gather a chunk of rows, multiply it
                                 backward   multiply a chunk, scatter its sum over the ranks
    column                       backward   multiply a chunk, sum it over the ranks
    row, sequence parallel       forward    multiply a chunk, scatter its sum over the ranks
                                 backward   gather a chunk of rows, multiply it
    row                          forward    multiply a chunk, sum it over the ranks

A chunk is some rows along the sequence; with sequence parallelism the same rows of each rank's part. The gradient of a
weight is one product over all rows, as in megatron-core's layers, so that its sums are no longer in bf16 than theirs.

Shapes: S sequence, L = S / ranks a rank's part of it, B batch, K inputs of a product, N outputs.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from mindspeed_llm.core.config import LlmConfig

Pending = list[tuple[dist.Work, Tensor]]
"""Collectives on their way, each with the tensor that it reads, which must live until then."""


class OverlappedColumnLinear(ColumnParallelLinear):
    """megatron-core's `ColumnParallelLinear`, in `config.overlapped_linear_chunks` chunks.

    Where it has nothing to send (experts under expert parallelism send by themselves) it is that class.
    """

    config: LlmConfig

    def _forward_impl(self, input: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> Tensor:
        sends = options["sequence_parallel"] or options["allreduce_dgrad"]
        if not sends or not weight.requires_grad:
            return super()._forward_impl(input, weight, *arguments, **options)
        assert not options["gradient_accumulation_fusion"] and options["grad_output_buffer"] is None
        output = _Column.apply(
            input, weight, options["tp_group"], options["sequence_parallel"], self.config.overlapped_linear_chunks
        )
        bias = options["bias"]
        return output if bias is None else output + bias


class OverlappedRowLinear(RowParallelLinear):
    """megatron-core's `RowParallelLinear`, in `config.overlapped_linear_chunks` chunks.

    Where it has nothing to send (experts under expert parallelism send by themselves) it is that class.
    """

    config: LlmConfig

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `RowParallelLinear`: [S, B, K] -> [S, B, N], with sequence parallelism [L, B, N]; and the bias, where it
        is left to the caller.
        """
        sends = self.tp_group.size() > 1 and not self.explicit_expert_comm
        if not sends or not self.input_is_parallel or not self.weight.requires_grad:
            return super().forward(input_)
        assert not self.gradient_accumulation_fusion
        chunks = self.config.overlapped_linear_chunks
        output = _Row.apply(input_, self.weight, self.tp_group, self.sequence_parallel, chunks)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


class _Column(torch.autograd.Function):
    """`input @ weight.T`, [L or S, B, K] -> [S, B, N], for a weight [N, K] that other ranks have other rows of."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, group: dist.ProcessGroup, sequence_parallel: bool, chunks: int
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.group, ctx.sequence_parallel, ctx.chunks = group, sequence_parallel, chunks
        if sequence_parallel:
            return gather_and_multiply(input, weight.t(), group, chunks)
        return torch.matmul(input, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        whole, gathering = _start_gather(input.contiguous(), ctx.group) if ctx.sequence_parallel else (input, None)
        multiply_and_send = multiply_and_scatter if ctx.sequence_parallel else multiply_and_sum
        of_input, pending = multiply_and_send(gradient, weight, ctx.group, ctx.chunks)
        _wait(gathering)
        # What is still on its way has this product to hide behind.
        of_weight = _weight_gradient(gradient, whole)
        _wait(pending)
        return of_input, of_weight, None, None, None


class _Row(torch.autograd.Function):
    """The sum over ranks of `input @ weight.T`, [S, B, K] -> [S or L, B, N], for a weight [N, K] that other ranks have
    other columns of.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, group: dist.ProcessGroup, sequence_parallel: bool, chunks: int
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.group, ctx.sequence_parallel, ctx.chunks = group, sequence_parallel, chunks
        multiply_and_send = multiply_and_scatter if sequence_parallel else multiply_and_sum
        output, pending = multiply_and_send(input.contiguous(), weight.t(), group, chunks)
        _wait(pending)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        if ctx.sequence_parallel:
            part, gradient = gradient, gradient.new_empty(*input.shape[:-1], len(weight))
            of_input = gather_and_multiply(part, weight, ctx.group, ctx.chunks, gathered=gradient)
        else:
            of_input = torch.matmul(gradient, weight)
        return of_input, _weight_gradient(gradient, input), None, None, None


def gather_and_multiply(
    part: Tensor, matrix: Tensor, group: dist.ProcessGroup, num_chunks: int, *, gathered: Tensor | None = None
) -> Tensor:
    """Gather the parts of all ranks and multiply them; the next chunk is gathered during a product.

    Args:
        part: this rank's rows, [L, B, K].
        matrix: [K, N].
        group: whose parts to gather.
        num_chunks: of the rows of a part; fewer where it has fewer rows.
        gathered: where to leave the rows of all ranks, [S, B, K], if they are wanted.

    Returns:
        The product, [S, B, N].
    """
    part, ranks = part.contiguous(), group.size()
    product = part.new_empty(ranks, *part.shape[:-1], matrix.shape[1])
    chunks = chunks_of(len(part), num_chunks)
    following = _start_gather(part[chunks[0]], group)
    for index, rows in enumerate(chunks):
        chunk, arriving = following
        if index + 1 < len(chunks):
            following = _start_gather(part[chunks[index + 1]], group)
        _wait(arriving)
        chunk = chunk.unflatten(0, (ranks, -1))
        if gathered is not None:
            gathered.unflatten(0, (ranks, -1))[:, rows] = chunk
        product[:, rows] = torch.matmul(chunk, matrix)
    return product.flatten(0, 1)


def multiply_and_scatter(
    whole: Tensor, matrix: Tensor, group: dist.ProcessGroup, num_chunks: int
) -> tuple[Tensor, Pending]:
    """Multiply and sum over ranks, each rank its part; a chunk is summed during the next chunk's product.

    Args:
        whole: all rows, [S, B, K], contiguous.
        matrix: [K, N].
        group: over whose ranks to sum.
        num_chunks: of the rows of a part; fewer where it has fewer rows.

    Returns:
        This rank's rows of the sum [L, B, N], which are there once the collectives are waited for.
    """
    parts = whole.unflatten(0, (group.size(), -1))
    output = whole.new_empty(*parts.shape[1:-1], matrix.shape[1])
    pending: Pending = []
    for rows in chunks_of(len(output), num_chunks):
        product = torch.matmul(parts[:, rows], matrix).flatten(0, 1).contiguous()
        pending.append((dist.reduce_scatter_tensor(output[rows], product, group=group, async_op=True), product))
    return output, pending


def multiply_and_sum(
    whole: Tensor, matrix: Tensor, group: dist.ProcessGroup, num_chunks: int
) -> tuple[Tensor, Pending]:
    """Multiply and sum over ranks; a chunk is summed during the next chunk's product.

    Args:
        whole: [S, B, K], contiguous.
        matrix: [K, N].
        group: over whose ranks to sum.
        num_chunks: of the rows; fewer where there are fewer.

    Returns:
        The sum [S, B, N], which is there once the collectives are waited for.
    """
    output = whole.new_empty(*whole.shape[:-1], matrix.shape[1])
    pending: Pending = []
    for rows in chunks_of(len(whole), num_chunks):
        chunk = torch.matmul(whole[rows], matrix, out=output[rows])
        pending.append((dist.all_reduce(chunk, group=group, async_op=True), chunk))
    return output, pending


def chunks_of(length: int, count: int) -> list[slice]:
    """`count` runs of rows, as even as can be, or one for each row where there are fewer."""
    count = min(length, count)
    bounds = [length * index // count for index in range(count + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(bounds)]


def _start_gather(part: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Pending]:
    """The rows of all ranks, which are there once the collective is waited for."""
    whole = part.new_empty(len(part) * group.size(), *part.shape[1:])
    return whole, [(dist.all_gather_into_tensor(whole, part, group=group, async_op=True), part)]


def _wait(pending: Pending | None) -> None:
    for work, _ in pending or ():
        work.wait()


def _weight_gradient(gradient: Tensor, input: Tensor) -> Tensor:
    """[..., N], [..., K] -> [N, K]."""
    return torch.matmul(gradient.flatten(0, -2).t(), input.flatten(0, -2))
