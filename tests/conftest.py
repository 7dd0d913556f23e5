"""Fixtures that the whole suite shares."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pool import RankPool

# Too long for each run, and in `scripts/soak.sh whole_grids`; what they are about has samples elsewhere.
_LONG = ("core/test_shared_master.py", "tasks/models/test_dropout.py")
collect_ignore = [] if os.environ.get("MINDSPEED_WHOLE_GRIDS") == "1" else list(_LONG)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a grid that is too long for each run, keep a fixed sample: each n-th of the tests marked `sampled(n)`; leave
    out those marked `long`.

    MINDSPEED_WHOLE_GRIDS=1 runs all; `scripts/soak.sh whole_grids` does.
    """
    if os.environ.get("MINDSPEED_WHOLE_GRIDS") == "1":
        return
    kept, left_out, seen = [], [], Counter[tuple[str, str]]()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if item.get_closest_marker("long") is not None:
            left_out.append(item)
            continue
        if mark is None:
            kept.append(item)
            continue
        grid = (item.path.as_posix(), getattr(item, "originalname", item.name))
        (kept if seen[grid] % mark.args[0] == 0 else left_out).append(item)
        seen[grid] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """What imports and collection have made stays: Python need not look at it in each collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The gloo ranks that every distributed row of the session runs on."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root folder of the repository."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Undo what a command that runs in this process does to the package's loggers."""
    logger = logging.getLogger("mindspeed_llm")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before
