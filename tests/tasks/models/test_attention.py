"""The core of attention against the definition, computed head by head and query by query in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import RankPool

pytestmark = pytest.mark.distributed
S, B, N, G, D = 13, 2, 6, 2, 16


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, documents: torch.Tensor | None
) -> torch.Tensor:
    """[S, B, N * D]; a query sees itself and what is before it, `window` positions in all, in its own document."""
    rows = []
    for position in range(S):
        for sample in range(B):
            seen = [
                other
                for other in range(position + 1)
                if (window is None or position - other < window)
                and (documents is None or documents[sample, other] == documents[sample, position])
            ]
            for head in range(N):
                group = head // (N // G)
                scores = key[seen, sample, group] @ query[position, sample, head] / math.sqrt(D)
                rows.append(scores.softmax(0) @ value[seen, sample, group])
    return torch.stack(rows).view(S, B, N * D)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, S, S + 5])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_is_what_its_definition_says(
    rank_pool: RankPool, family: Callable[[str], Path], flash: bool, window: int | None, packed: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    query, key, value, weights = (
        torch.randn(shape, generator=generator) for shape in ((S, B, N, D), (S, B, G, D), (S, B, G, D), (S, B, N * D))
    )
    documents = torch.tensor([[0] * 4 + [1] * 3 + [2] * 6, [0] * 13]) if packed else None
    inputs = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    output = expected(*inputs, window, documents)
    gradients = torch.autograd.grad(output, inputs, weights.double())
    values: dict[str, Any] = {"use_flash_attn": flash, "sliding_window": window}
    [found] = rank_pool.run(
        "tests.tasks.models.rows:attention",
        ranks=1,
        folder=str(family("llama2")),
        tensors=[tensor.numpy() for tensor in (query, key, value, weights)],
        documents=None if documents is None else documents.numpy(),
        **values,
    )
    for mine, right in zip(found, (output, *gradients), strict=True):
        # A query that sees itself alone has no gradient.
        assert (torch.from_numpy(mine) - right).norm() <= 1e-6 * max(right.norm(), output.norm())
