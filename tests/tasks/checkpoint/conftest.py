"""Toy models that several modules convert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tasks.checkpoint import hf_toys, toys
from tests.tasks.checkpoint.test_layout import PP
from tests.tasks.checkpoint.test_lora_merge import ATTENTION, MLP, HfToy, Made, make


@pytest.fixture(scope="session")
def hf_toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a toy of `hf_toys`, made when it is first asked for; do not write to it."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = hf_toys.save(tmp_path_factory.mktemp("toy") / name, name)
        return made[name]

    return of


@pytest.fixture(scope="module")
def made(hf_toy: HfToy) -> Made:
    """A toy, adapters for all its linear layers, and the merged weights."""
    return make(hf_toy, "llama", (*ATTENTION, *MLP), shared=True)


@pytest.fixture(scope="module")
def base(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That toy as a Megatron checkpoint of two stages."""
    folder = tmp_path_factory.mktemp("base") / "mg"
    toys.run(made.hf, folder, PP, "2")
    return folder
