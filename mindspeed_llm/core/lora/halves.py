"""The two matrices of an adapter, and what A begins with."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

A_KEY, B_KEY = "lora_A.default.weight", "lora_B.default.weight"
"""As PEFT calls them in a model; `default` is its name for a model's one adapter."""


def initial_a(name: str, seed: int, rank: int, inputs: int) -> Tensor:
    """What A [rank, inputs] of the adapter `name` begins with: as in PEFT uniform, kaiming with a = sqrt(5), which is
    within 1 / sqrt(inputs).

    It is drawn for the whole matrix by a generator of its own, so that it depends on nothing but the arguments: on no
    topology, and not on what else is drawn.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs, dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator)


def initial_b(name: str, seed: int, rank: int, outputs: int) -> Tensor:
    """What B [outputs, rank] of the adapter `name` begins with where no gradient would ever move it away from zeros:
    normal numbers of standard deviation 1e-4, drawn like `initial_a`.
    """
    digest = hashlib.sha256(f"{seed} {name} B".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(outputs, rank, dtype=torch.float32, device="cpu").normal_(0.0, 1e-4, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a layer is cut over the ranks of a group."""

    axis: int | None
    """Of its weight [out, in]: 0 by rows, which B follows; 1 by columns, which A follows."""
    index: int
    count: int
    group: Any


class _Matrix(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self) -> Tensor:
        return self.weight


class Halves(nn.Module):
    """A and B of one adapter: this rank's share of them. B begins with zeros.

    Args:
        name: for `initial_a`.
        inputs, outputs: of this rank's part of the layer.
        like: a parameter whose device and dtype to take.
        cut: how the layer is cut over ranks.
    """

    def __init__(self, name: str, *, seed: int, rank: int, inputs: int, outputs: int, like: Tensor, cut: Cut) -> None:
        super().__init__()
        self.name = name
        whole = inputs * cut.count if cut.axis == 1 else inputs
        first = cut.index * inputs if cut.axis == 1 else 0
        a = initial_a(name, seed, rank, whole)[:, first : first + inputs].to(like).contiguous()
        self.lora_A = nn.ModuleDict({"default": _Matrix(a)})
        self.lora_B = nn.ModuleDict({"default": _Matrix(like.new_zeros(outputs, rank))})
        self.cut = cut
        mark(self.a, cut, is_cut=cut.axis == 1)
        mark(self.b, cut, is_cut=cut.axis == 0)

    @property
    def a(self) -> Tensor:
        """[rank, inputs]"""
        return self.lora_A["default"].weight

    @property
    def b(self) -> Tensor:
        """[outputs, rank]"""
        return self.lora_B["default"].weight

    @torch.no_grad()
    def begin_b(self, values: Tensor, *, blocks: int = 1) -> None:
        """Have B begin with this rank's share of `values` [outputs of all ranks, rank], whose rows are `blocks` blocks
        of one size that are cut each on its own.
        """
        if self.cut.axis == 0:
            rows = values.unflatten(0, (blocks, self.cut.count, -1))
            values = rows[:, self.cut.index].flatten(0, 1)
        self.b.copy_(values)

    def forward(self) -> tuple[Tensor, Tensor]:
        """A and B for a forward pass: with `--overlap-param-gather` new values arrive when their modules are called."""
        return self.lora_A["default"](), self.lora_B["default"]()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Where the two lie in the whole matrices, see megatron-core."""
        axes = {0: {B_KEY: 0}, 1: {A_KEY: 1}, None: {}}[self.cut.axis]
        return make_sharded_tensors_for_checkpoint(
            {A_KEY: self.a, B_KEY: self.b},
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.cut.group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def mark(parameter: Tensor, cut: Cut, *, is_cut: bool, is_expert: bool = False) -> None:
    """Tell megatron-core whether other ranks have other parts of a parameter: the norm of gradients counts copies once.

    Copies of experts' parameters count on the first rank of their own tensor parallel group, where megatron-core looks
    at the rank among all tensor parallel ranks: there it is told that these are no copies.
    """
    distinct = is_cut or (is_expert and cut.index == 0)
    parameter.tensor_model_parallel = distinct  # type: ignore[attr-defined]
    parameter.partition_dim = cut.axis if is_cut else -1  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]
