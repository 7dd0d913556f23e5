"""Linear layers in chunks are megatron-core's, in another order of work."""

from __future__ import annotations

import pytest

from tests.support.pool import RankPool

ROWS = "tests.core.overlapped_rows"


@pytest.mark.parametrize(
    ("length", "count", "sizes"), [(8, 4, [2, 2, 2, 2]), (7, 4, [1, 2, 2, 2]), (3, 8, [1, 1, 1]), (5, 1, [5])]
)
def test_chunks_are_all_rows_in_order(length: int, count: int, sizes: list[int]) -> None:
    from mindspeed_llm.core.overlapped_linears import chunks_of

    chunks = [range(length)[rows] for rows in chunks_of(length, count)]
    assert [len(chunk) for chunk in chunks] == sizes
    assert [row for chunk in chunks for row in chunk] == list(range(length))


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "rows", "chunks"), [(2, [1, 5, 8], [1, 2, 4, 8]), (4, [7], [4])])
def test_equals_the_layers_of_megatron_core(
    rank_pool: RankPool, ranks: int, rows: list[int], chunks: list[int]
) -> None:
    for found in rank_pool.run(f"{ROWS}:differences", ranks=ranks, rows=rows, chunks=chunks):
        assert len(found) == 8 * len(rows) * len(chunks)
        assert max(found.values()) < 1e-6, found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mutant", "rows"), [("chunk_after_chunk", 8), ("rows_left_over", 7), ("last_chunk_not_summed", 8)]
)
def test_mutants_are_caught(rank_pool: RankPool, mutant: str, rows: int) -> None:
    for found in rank_pool.run(f"{ROWS}:differences", ranks=2, rows=[rows], chunks=[2], mutant=mutant):
        # Each kind of layer has the fault in one direction, with or without sequence parallelism.
        for kind in ("column", "row"):
            # A NaN is a difference, too: rows that nobody has written.
            assert not all(value < 1e-3 for name, value in found.items() if name.startswith(kind)), found


@pytest.mark.distributed
def test_checkpoints_have_the_same_names_and_places(rank_pool: RankPool) -> None:
    for found in rank_pool.run(f"{ROWS}:keys_and_places", ranks=2):
        assert found["column 4"] == found["column 0"]
        assert found["row 4"] == found["row 0"]


PRODUCT = ["multiply"]
GATHERING = [
    *("start gather 0", "start gather 1", "end gather 0", "multiply"),
    *("start gather 2", "end gather 1", "multiply", "end gather 2", "multiply"),
]


def sending(word: str, between: list[str]) -> list[str]:
    """Three chunks, each sent before the next is multiplied; what comes before the end of the sending; the end."""
    started = [event for index in range(3) for event in ("multiply", f"start {word} {index}")]
    return [*started, *between, *(f"end {word} {index}" for index in range(3))]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "forward", "backward"),
    [
        ("column", True, GATHERING, ["start gather 0", *sending("scatter", ["end gather 0", "multiply"])]),
        ("column", False, PRODUCT, sending("sum", PRODUCT)),
        ("row", True, sending("scatter", []), [*GATHERING, "multiply"]),
        ("row", False, sending("sum", []), [*PRODUCT, *PRODUCT]),
    ],
)
def test_a_chunk_is_on_its_way_while_the_next_is_multiplied(
    rank_pool: RankPool, kind: str, sequence_parallel: bool, forward: list[str], backward: list[str]
) -> None:
    for found in rank_pool.run(
        f"{ROWS}:events", ranks=2, kind=kind, sequence_parallel=sequence_parallel, rows=7, chunks=3
    ):
        assert found == {"forward": forward, "backward": backward}
