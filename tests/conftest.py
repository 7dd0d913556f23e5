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
# Those of the other files that take longest: they start first, so that at the end no core waits for a long one.
_FIRST = (
    "distributed/test_resume.py",
    "distributed/test_saving.py",
    "distributed/test_parity.py",
    "distributed/test_lines_of_training.py",
    "distributed/test_kill.py",
    "distributed/test_damaged_checkpoints.py",
    "fsdp2/plan/test_memory.py",
    "training/checkpointing/test_topologies.py",
    "training/checkpointing/test_resume.py",
    "training/checkpointing/test_flags.py",
    "training/checkpointing/test_disks.py",
    "training/checkpointing/test_conversion.py",
    "training/checkpointing/test_pretrain.py",
    "training/checkpointing/test_kill.py",
    "tasks/models/test_parity.py",
    "tasks/models/test_resharding.py",
    "tasks/posttrain/test_dpo.py",
    "tasks/posttrain/test_eval_samples.py",
    "tasks/checkpoint/test_round_trip.py",
    "core/lora/test_checkpoints.py",
    "core/lora/test_local_learning.py",
    "benchmarks/test_commands.py",
    "docs/test_commands.py",
    "scripts/test_quickstart.py",
    "fsdp2/test_main.py",
    "fsdp2/checkpoint/test_resume_memory.py",
)
collect_ignore = [] if os.environ.get("MINDSPEED_WHOLE_GRIDS") == "1" else list(_LONG)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a grid that is too long for each run, keep a fixed sample: each n-th of the tests marked `sampled(n)`; leave
    out those marked `long`.

    MINDSPEED_WHOLE_GRIDS=1 runs all; `scripts/soak.sh whole_grids` does. Files that take long come first.
    """
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
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
    # A command that a fixture of a module ran has switched it off; caplog then listens here and at the root.
    logger.propagate = True
    yield
    logger.handlers[:], logger.level, logger.propagate = before
