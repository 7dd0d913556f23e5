"""LU-LoRA: adapters that learn from what passes through them, without gradients.

Oja's rule ("A simplified neuron model as a principal component analyzer", 1982; for subspaces "Neural networks,
principal components, and subspaces", 1989) moves the weights W of y = W x along

    mean of  y x^T - y y^T W                                over tokens

until the rows of W are an orthonormal basis of the directions in which x varies most. For an adapter with y = A x and
z = B y it is applied to A with (x, y) and to B with (y, z):

    M  = mean of y x^T                [rank, in]            the only sum that a step gathers
    C  = mean of y y^T = M A^T        [rank, rank]
    dA = M - C A
    dB = (B C) - (B C B^T) B = B (C - C B^T B)

A step's means are over all tokens of its global batch, on all data-parallel ranks, and are applied once, so that
nothing depends on micro batches or ranks. Tokens that fill up rows behind their samples count like others, as a layer
does not know which these are.

How sums come together where tensor parallel ranks share a layer:

    column   x and A on all ranks         M is whole on each, or with sequence parallelism of each rank's tokens: summed
             B by rows                    B^T B is summed
    row      x and A by columns, y summed M has the rank's columns; M A^T is summed
             B on all ranks               B^T B is whole on each

The matrices are fp32 whatever the model computes in, as steps are far smaller than what bf16 tells apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from mindspeed_llm.core.lora.halves import Halves


class LocalRule:
    """Gathers what the adapters of one layer learn from a step. Between `begin` and `update` only: evaluation, and
    whatever else runs the model, leaves no trace.

    Args:
        halves: the adapters, all of one rank, in the order in which their A stand above each other.
        is_column: how the layer is cut over tensor parallel ranks, see above.
        sequence_parallel: whether each of them has its own part of the sequence.
    """

    def __init__(self, halves: Sequence[Halves], *, is_column: bool, sequence_parallel: bool) -> None:
        self.halves, self.is_column = tuple(halves), is_column
        self.group = self.halves[0].cut.group
        self._cut_by_tokens = sequence_parallel and self.group.size() > 1
        self.packed: Tensor | None = None
        """[rank of all adapters * in + 1], fp32: the sum of y x^T over tokens, their number. None: not gathering."""
        for half in self.halves:
            half.a.requires_grad_(False)
            half.b.requires_grad_(False)

    @property
    def has_own_tokens(self) -> bool:
        """Whether the sums of tensor parallel ranks are over different tokens."""
        return self.is_column and self._cut_by_tokens

    def keep_in_fp32(self) -> None:
        """Turn the adapters back into fp32, once the model has another dtype."""
        for half in self.halves:
            half.a.data, half.b.data = half.a.data.float(), half.b.data.float()

    def begin(self) -> None:
        """Gather from now on."""
        size = sum(half.a.numel() for half in self.halves)
        self.packed = torch.zeros(size + 1, dtype=torch.float32, device=self.halves[0].a.device)

    @torch.no_grad()
    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Take in the tokens of a forward pass; of a model in bf16 their sum is rounded, sums of passes are fp32.

        Args:
            inputs: x of this rank, [S or L, B, in].
            outputs: y = A x [S or L, B, rank of all adapters]: of a column layer for these tokens; of a row layer the
                sum over ranks, under sequence parallelism for this rank's part of the tokens.
        """
        if self.packed is None:
            return
        if self._cut_by_tokens and not self.is_column:
            outputs = gather_from_sequence_parallel_region(outputs, group=self.group)
        x, y = inputs.flatten(0, -2), outputs.flatten(0, -2)
        if x.dtype == torch.float16:
            x, y = x.float(), y.float()  # a sum over many tokens may be more than fp16 has
        self.packed[:-1] += (y.t() @ x).flatten()
        self.packed[-1] += len(x)

    def means(self) -> list[Tensor]:
        """M of each adapter, [rank, in] of this rank; ends the gathering."""
        assert self.packed is not None
        sums, count = self.packed[:-1] / self.packed[-1], len(self.halves)
        self.packed = None
        return [mean.view_as(half.a) for mean, half in zip(sums.chunk(count), self.halves, strict=True)]


def local_rules(modules: Iterable[nn.Module]) -> list[LocalRule]:
    """The rules of the layers in models of this rank."""
    found = (getattr(layer, "local_rule", None) for module in modules for layer in module.modules())
    return [rule for rule in found if rule is not None]


class LocalUpdates:
    """The local updates of a rank's adapters: `begin`, forward passes, then `apply` or `drop`.

    Args:
        rules: those of this rank.
        data_parallel: the group of ranks that see other tokens with the same layers.
    """

    def __init__(self, rules: Sequence[LocalRule], data_parallel: Any) -> None:
        self._rules, self._data_parallel = tuple(rules), data_parallel

    def begin(self) -> None:
        """Begin to gather what a step's forward passes teach."""
        for rule in self._rules:
            rule.begin()

    def drop(self) -> None:
        """Forget it, as a step does that is skipped."""
        for rule in self._rules:
            rule.packed = None

    @torch.no_grad()
    def apply(self, *, rate_of_a: float, rate_of_b: float) -> None:
        """Move the adapters (a collective of the ranks of a stage)."""
        if not self._rules:
            return
        group = self._rules[0].group
        _sum([rule.packed for rule in self._rules if rule.has_own_tokens], group)
        _sum([rule.packed for rule in self._rules], self._data_parallel)
        adapters = [
            (rule.is_column, half, mean)
            for rule in self._rules
            for half, mean in zip(rule.halves, rule.means(), strict=True)
        ]
        covariances = [mean @ half.a.t() for _, half, mean in adapters]
        squares = [half.b.t() @ half.b for _, half, _ in adapters]
        parts = [b if column else a for (column, *_), a, b in zip(adapters, covariances, squares, strict=True)]
        _sum(parts, group)
        for (_, half, mean), covariance, square in zip(adapters, covariances, squares, strict=True):
            delta_a = mean - covariance @ half.a
            delta_b = half.b @ (covariance - covariance @ square)
            half.a.add_(delta_a, alpha=rate_of_a)
            half.b.add_(delta_b, alpha=rate_of_b)


def _sum(tensors: Sequence[Tensor | None], group: Any) -> None:
    """Sum tensors over ranks, in place and all at once."""
    own = [tensor for tensor in tensors if tensor is not None]
    if not own or group.size() == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in own])
    dist.all_reduce(flat, group=group)
    for tensor, summed in zip(own, flat.split([tensor.numel() for tensor in own]), strict=True):
        tensor.copy_(summed.view_as(tensor))
