"""Disks that become full or are read-only, nodes with disks of their own, and two runs with one folder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mindspeed_llm.locks import FileLock
from mindspeed_llm.training.checkpointing.lock import FILE_NAME
from tests.support.mounts import mounted
from tests.training.checkpointing.conftest import Workplace

pytestmark = pytest.mark.distributed
FORMATS = ("torch", "torch_dist")
TP2 = ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer"]
CHOOSE = "tests.training.checkpointing.rows:choose"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_full_disk(place: Workplace, tmp_path: Path, kind: str) -> None:
    """The first checkpoint fits, the second does not; what was written of it is removed."""
    trial = tmp_path / "trial"
    place.train("llama_tied", 2, TP2, steps=1, save=trial, saves=[(1, kind, trial)])
    size = sum(path.stat().st_size for path in trial.rglob("*") if path.is_file())
    for share in (1.1, 1.5, 1.9):
        with mounted(tmp_path / "disk", f"size={int(size * share)}") as disk:
            runs = place.train("llama_tied", 2, TP2, steps=2, save=disk, saves=[(1, kind, disk), (2, kind, disk)])
            assert names(disk) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
            for run in runs:
                assert len(run["steps"]) == 2
                assert run["error"].startswith(f"CheckpointError: writing to {disk}/iter_0000002.tmp failed on rank ")
                assert "No space left on device" in run["error"], run["error"]
            ((found,), _) = place.pool.run(CHOOSE, ranks=2, loads=[(str(disk), None)])
            assert found["chosen"] == str(disk / "iter_0000001") and not found["log"]


def test_a_disk_without_room_for_anything(place: Workplace, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=4k") as disk:
        (disk / "other").write_bytes(bytes(4096))
        for run in place.train("llama", 2, [], steps=1, save=disk, saves=[(1, "torch", disk)]):
            assert run["error"].startswith("CheckpointError: ") and "No space left on device" in run["error"]


def test_a_read_only_disk(place: Workplace, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=20m") as disk:
        place.train("llama", 1, [], steps=1, save=disk, saves=[(1, "torch", disk)])
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        (run,) = place.train("llama", 1, [], steps=2, load=disk, save=disk, saves=[(2, "torch", disk)])
        assert run["start"] == 1
        assert run["error"].startswith(f"CheckpointError: making {disk} failed on rank 0: ")
        assert "Read-only file system" in run["error"]
        assert names(disk) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_a_file_where_the_folder_should_be(place: Workplace, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (run,) = place.train("llama", 1, [], steps=1, save=tmp_path / "file", saves=[(1, "torch", tmp_path / "file")])
    assert run["error"].startswith("CheckpointError: making ") and "File exists" in run["error"]


def test_two_runs_save_in_one_folder(place: Workplace, tmp_path: Path) -> None:
    lock = FileLock(tmp_path / FILE_NAME, without_locks="")
    lock.take()
    try:
        for run in place.train("llama", 2, [], steps=1, save=tmp_path, saves=[(1, "torch", tmp_path)]):
            assert run["error"].startswith(f"UserError: --save {tmp_path}: another run (process ")
    finally:
        lock.release()
    (run, _) = place.train("llama", 2, [], steps=1, save=tmp_path, saves=[(1, "torch", tmp_path)])
    assert run["error"] is None
    assert names(tmp_path) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_nodes_with_disks_of_their_own(place: Workplace, tmp_path: Path) -> None:
    """Two nodes of one rank each, which replicate each other: each node's folder is a whole checkpoint for it."""
    whole = place.train("llama", 2, [], steps=2)
    nodes = [tmp_path / "node_0", tmp_path / "node_1"]
    options = {"nodes": [str(node) for node in nodes]}
    first = place.train("llama", 2, [], steps=1, saves=[(1, "torch", tmp_path)], **options)
    assert [run["error"] for run in first] == [None, None]
    for node in nodes:
        assert names(node) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
        assert names(node / "iter_0000001") == ["manifest.json", "mp_rank_00"]
    resumed = place.train("llama", 2, [], steps=2, load=tmp_path, **options)
    assert [run["error"] for run in resumed] == [None, None]
    assert [run["steps"] for run in resumed] == [run["steps"][1:] for run in whole]
    # Damage on one node is damage for all.
    shutil.copytree(nodes[1] / "iter_0000001", nodes[1] / "iter_0000002")
    (nodes[1] / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt").unlink()
    for run in place.train("llama", 2, [], steps=2, load=tmp_path, **options):
        assert "mp_rank_00/model_optim_rng.pt is missing" in run["error"]
    for run in place.train("llama", 2, [], steps=1, saves=[(1, "torch_dist", tmp_path)], **options):
        assert "--ckpt-format torch_dist needs a folder that all nodes see" in run["error"]
