"""A few kills inside a save; `bash scripts/soak.sh mcore_kill` makes more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.checkpointing.kill import FORMATS, kill_while_saving

pytestmark = pytest.mark.distributed
KILLS, SEED = 2, 11


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_survives_kills(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines = kill_while_saving(tmp_path, kind=kind, kills=KILLS, seed=SEED)
    assert len(lines) == KILLS
