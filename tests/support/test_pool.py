"""The rank pool itself: worlds of the asked size, and failures that are reported instead of hanging the session."""

from __future__ import annotations

import pytest

from tests.support.pool import RankPool, RowFailed, RowHung

ROWS = "tests.support.pool_rows"


def test_rows_see_a_world_of_exactly_their_ranks(rank_pool: RankPool) -> None:
    for ranks in (1, 2, 4, 2):
        facts = rank_pool.run(f"{ROWS}:world_facts", ranks=ranks)
        assert facts == [{"rank": r, "world": ranks, "sum": ranks * (ranks + 1) // 2} for r in range(ranks)]


def test_rows_find_their_own_groups(rank_pool: RankPool) -> None:
    """Groups have other names in the second row, and those of the first row are names of other groups there."""
    for groups_before in (0, 1):
        rows = rank_pool.run(f"{ROWS}:gathered", ranks=4, timeout=60, groups_before=groups_before)
        assert rows == [[0, 1, 2, 3]] * 4


def test_failures_are_reported_and_the_pool_recovers() -> None:
    pool = RankPool(size=2)
    try:
        pool.run(f"{ROWS}:world_facts", ranks=2)
        with pytest.raises(RowFailed, match="fails on purpose") as failed:
            pool.run(f"{ROWS}:raise_on", ranks=2, rank=1)
        assert (1, "ValueError") in [error[:2] for error in failed.value.errors]
        with pytest.raises(RowHung, match="hang_on") as hung:
            pool.run(f"{ROWS}:hang_on", ranks=2, rank=0, timeout=3)
        assert "in hang_on" in str(hung.value)
        with pytest.raises(RowHung, match=r"rank 1 died \(exit code 3\)"):
            pool.run(f"{ROWS}:die_on", ranks=2, rank=1)
        assert pool.run(f"{ROWS}:world_facts", ranks=1)[0]["world"] == 1
    finally:
        pool.close()
