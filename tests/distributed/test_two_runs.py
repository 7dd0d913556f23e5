"""One run at a time writes to an output folder, whether the nodes share it or not."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.checkpoints.run_lock import FILE_NAME
from mindspeed_llm.fsdp2.checkpoint.manifest import steps_in
from mindspeed_llm.locks import FileLock
from tests.distributed.test_resume import ROW, Workplace, ends
from tests.support.pool import RankPool
from tests.support.runs import write_config

pytestmark = pytest.mark.distributed
QUIET: dict[str, Any] = {"save_hf_weights": False}


@pytest.fixture
def place(rank_pool: RankPool, tmp_path: Path) -> Workplace:
    return Workplace(rank_pool, tmp_path, toy="llama_uneven", data="lf")


def _hold(path: Path, connection: Connection) -> None:
    lock = FileLock(path, without_locks="")
    lock.take("another run")
    connection.send(os.getpid())
    connection.recv()


def held_by_another(path: Path) -> tuple[Any, int, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_hold, args=(path, there), daemon=True)
    process.start()
    return process, here.recv(), here


def test_a_second_run_is_refused_and_changes_nothing(place: Workplace) -> None:
    run = place.folder / "run"
    place.run("run", 2, max_steps=2, save_steps=2, **QUIET)
    assert not (run / FILE_NAME).exists()
    process, pid, _ = held_by_another(run / FILE_NAME)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for training in ({}, {"resume_from_checkpoint": "latest"}):
        rows = place.run("run", 2, max_steps=4, save_steps=2, **training, **QUIET)
        for rank in rows:
            assert rank["code"] == 2 and f"another run (process {pid} on " in rank["error"], rank["error"]
            assert f"is writing to {run}" in rank["error"]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    # The lock ends with the process; what it leaves behind does not matter.
    process.kill()
    process.join()
    assert (run / FILE_NAME).exists()
    assert ends(place.run("run", 2, max_steps=4, save_steps=2, **QUIET)) == [(0, None)] * 2
    assert not (run / FILE_NAME).exists()


@pytest.mark.long
def test_nodes_with_disks_of_their_own(place: Workplace) -> None:
    """A lock on each, and each sets its own part of an earlier run aside."""
    data = {**place.data, "data_shared_file_system": False}
    (place.folder / "node_{node}").mkdir()
    config = write_config(
        place.folder / "node_{node}" / "run", place.model, data, stage="pt", max_steps=2, save_steps=1, **QUIET
    )
    text = Path(config).read_text()
    runs = [place.folder / f"node_{node}" / "run" for node in (0, 1)]
    for node, run in enumerate(runs):
        run.parent.mkdir()
        run.with_suffix(".yaml").write_text(text.replace("{node}", str(node)))

    def train() -> list[dict[str, Any]]:
        return place.pool.run(ROW, ranks=4, argv=[config], nodes=2)

    assert ends(train()) == [(0, None)] * 4
    assert ends(train()) == [(0, None)] * 4
    for run in runs:
        assert [step for step, _ in steps_in(run / "checkpoints")] == [1, 2]
        assert [step for step, _ in steps_in(run / "checkpoints.1")] == [1, 2]
        assert not (run / FILE_NAME).exists()
    process, pid, _ = held_by_another(runs[1] / FILE_NAME)
    try:
        for rank in train():
            assert rank["code"] == 2 and f"another run (process {pid} on " in rank["error"], rank["error"]
        assert not (runs[0] / FILE_NAME).exists() and not (runs[0] / "checkpoints.2").exists()
    finally:
        process.kill()
        process.join()


def test_a_shared_folder_has_one_lock_for_all_nodes(place: Workplace) -> None:
    config = write_config(place.folder / "run", place.model, place.data, stage="pt", max_steps=2, save_steps=1, **QUIET)
    assert ends(place.pool.run(ROW, ranks=4, argv=[config], nodes=2)) == [(0, None)] * 4
    assert not (place.folder / "run" / FILE_NAME).exists()
