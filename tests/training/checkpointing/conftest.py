"""Toys on disk with their samples, and runs of them on the shared ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool
from tests.support.toys import TOYS, save_toy

ROW = "tests.training.checkpointing.rows:train"
SCHEDULE = ["--train-iters", "10", "--lr-decay-style", "cosine", "--lr-warmup-iters", "3", "--min-lr", "1e-5"]


class Workplace:
    """Trains toys; folders are made once."""

    def __init__(self, rank_pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = rank_pool, folder
        self._toys: dict[str, Path] = {}

    def toy(self, name: str) -> Path:
        """The Hugging Face directory of a toy."""
        if name not in self._toys:
            self._toys[name] = save_toy(name, self.folder / name)
        return self._toys[name]

    def train(
        self,
        toy: str,
        ranks: int,
        flags: Sequence[str],
        *,
        steps: int,
        load: Path | None = None,
        save: Path | None = None,
        saves: Sequence[tuple[int, str, Path]] = (),
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Each rank's result of `rows.train`."""
        folders = [*(["--load", str(load)] if load else []), *(["--save", str(save)] if save else [])]
        return self.pool.run(
            ROW,
            ranks=ranks,
            folder=str(self.toy(toy)),
            vocabulary=TOYS[toy]["vocab_size"],
            steps=steps,
            flags=[*SCHEDULE, *flags, *folders],
            saves=[(number, kind, str(target)) for number, kind, target in saves],
            from_hf=load is None,
            **options,
        )


@pytest.fixture(scope="package")
def place(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Where the tests of this folder train."""
    return Workplace(rank_pool, tmp_path_factory.mktemp("checkpointing"))
