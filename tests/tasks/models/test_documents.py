"""Packed documents do not see each other: neither do their numbers change, nor does anything leak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.pool import RankPool
from tests.tasks.models.families import build
from tests.tasks.models.topologies import ALLTOALL, EP2, PP2, SP, TP2, VPP

pytestmark = pytest.mark.distributed
ROW = "tests.tasks.models.rows:documents"
Family = Callable[[str], Path]
# Lengths of the documents of each of two samples of 32 tokens.
LENGTHS = ((5, 1, 16, 10), (32,))
FLASH = {"use_flash_attn": True}
SPREAD: list[tuple[str, int, dict[str, Any]]] = [
    ("llama2", 1, {}),
    ("llama2", 1, FLASH),
    ("llama-yarn", 2, TP2 | SP | FLASH),
    ("llama-tied", 2, PP2 | VPP),
    # Windows that end before, at and after the start of a document.
    ("mistral", 1, {}),
    ("mistral", 1, FLASH),
    ("mistral", 2, TP2 | FLASH),
    ("qwen25-tied-windows", 2, PP2 | FLASH),
    ("qwen3", 1, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "ranks", "values"), SPREAD)
def test_other_documents_stay_bit_equal(
    rank_pool: RankPool, family: Family, name: str, ranks: int, values: dict[str, Any]
) -> None:
    """Each document in turn gets other tokens: the logits of the others do not move by a bit, its own do."""
    found = rank_pool.run(ROW, ranks=ranks, folder=str(family(name)), lengths=LENGTHS, **values)
    moved = [of_rank["moved"] for of_rank in found if of_rank is not None]
    assert moved
    for of_rank in moved:
        for changed, documents in of_rank.items():
            assert {document for document, has_moved in documents.items() if has_moved} == {changed}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "ranks", "values"),
    [*SPREAD, ("qwen2-moe", 1, {}), ("mixtral", 2, EP2 | ALLTOALL | FLASH)],
)
def test_each_document_is_computed_as_if_alone(
    rank_pool: RankPool, family: Family, name: str, ranks: int, values: dict[str, Any]
) -> None:
    """Rotary positions are relative: where a document starts does not matter. The authority is transformers' model of
    the document alone.
    """
    found = rank_pool.run(ROW, ranks=ranks, folder=str(family(name)), lengths=LENGTHS, **values)
    parts = [of_rank["logits"] for of_rank in found if of_rank is not None]
    if len(parts) == 2 and values.get("tensor_model_parallel_size") == 2:
        parts = [np.concatenate(parts, axis=-1)]
    model, ids = build(name), torch.load(family(name) / "reference.pt")["ids"]
    for logits in parts:
        for sample, lengths in enumerate(LENGTHS):
            for start, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
                with torch.no_grad():
                    [alone] = model(ids[sample : sample + 1, start : start + length]).logits.numpy()
                packed = logits[sample, start : start + length, : alone.shape[-1]]
                assert np.abs(packed - alone).max() <= 1e-5 * alone.std()


def test_without_document_numbers_they_do_see_each_other(rank_pool: RankPool, family: Family) -> None:
    """The check above can fail."""
    [found] = rank_pool.run(ROW, ranks=1, folder=str(family("llama2")), lengths=LENGTHS, told=False)
    assert any(
        has_moved
        for changed, documents in found["moved"].items()
        for document, has_moved in documents.items()
        if document != changed
    )
