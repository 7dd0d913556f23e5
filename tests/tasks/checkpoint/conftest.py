"""Toy models that several modules convert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tasks.checkpoint import hf_toys


@pytest.fixture(scope="session")
def hf_toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a toy of `hf_toys`, made when it is first asked for; do not write to it."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = hf_toys.save(tmp_path_factory.mktemp("toy") / name, name)
        return made[name]

    return of
