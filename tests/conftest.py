"""Fixtures that the whole suite shares."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pool import RankPool


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


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Undo what a command that runs in this process does to the package's loggers."""
    logger = logging.getLogger("mindspeed_llm")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before
