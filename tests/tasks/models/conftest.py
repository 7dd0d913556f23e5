"""Toys that the tests of models share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tasks.models import families


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a toy with what transformers computes, see `families.save`; made when it is first asked for."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = families.save(name, tmp_path_factory.mktemp("family") / name)
        return made[name]

    return of
