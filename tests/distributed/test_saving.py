"""When a run saves, what it keeps, how it ends, and what a failed write does."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_resume import ROW, STEPS, Workplace, ends
from tests.support.mounts import mounted
from tests.support.pool import RankPool
from tests.support.runs import copy_run, exported, metrics, write_config

pytestmark = pytest.mark.distributed
QUIET: dict[str, Any] = {"save_hf_weights": False}


@pytest.fixture(scope="module")
def place(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Model and texts for small runs."""
    return Workplace(rank_pool, tmp_path_factory.mktemp("saving"), toy="llama_uneven", data="lf")


def saved(output: Path) -> list[int]:
    """Steps of all checkpoints; there must be nothing else beside them."""
    names = {path.name for path in (output / "checkpoints").iterdir()} - {"latest"}
    assert all(name.startswith("global_step_") and name.removeprefix("global_step_").isdecimal() for name in names)
    return sorted(int(name.removeprefix("global_step_")) for name in names)


def test_when_it_saves_and_what_it_keeps(place: Workplace) -> None:
    output = place.folder / "limits"
    rows = place.run("limits", 2, max_steps=7, save_steps=2, save_total_limit=2, **QUIET)
    assert saved(output) == [6, 7]
    (line,) = [line for line in rows[0]["log"] if "Num examples" in line]
    per_epoch = int(line.rpartition("= ")[2])
    ends_of_epochs = [math.ceil(per_epoch * epoch / 8) for epoch in (1, 2)]
    assert per_epoch % 8 and ends_of_epochs[1] < 22
    for save_epochs, expected in ((1, [*ends_of_epochs, 22]), (2, [ends_of_epochs[1], 22])):
        training = {"max_steps": 22, "per_device_train_batch_size": 4, "save_epochs": save_epochs, **QUIET}
        place.run("epochs", 2, save_total_limit=0, **training)
        assert saved(place.folder / "epochs") == expected
        shutil.rmtree(place.folder / "epochs")


def test_a_resumed_run_replaces_the_checkpoints_it_passes_again(place: Workplace) -> None:
    place.run("again", 2, max_steps=6, save_steps=2, **QUIET)
    checkpoints = place.folder / "again" / "checkpoints"
    before = {step: (checkpoints / f"global_step_{step}").stat().st_ino for step in (2, 4, 6)}
    again = place.run(
        "again", 2, max_steps=6, save_steps=2, resume_from_checkpoint=str(checkpoints / "global_step_2"), **QUIET
    )
    assert ends(again) == [(0, None)] * 2
    assert saved(place.folder / "again") == [2, 4, 6]
    after = {step: (checkpoints / f"global_step_{step}").stat().st_ino for step in (2, 4, 6)}
    assert after[2] == before[2] and after[4] != before[4] and after[6] != before[6]


def test_a_replacement_that_was_cut_off_is_undone(place: Workplace) -> None:
    place.run("cut", 1, max_steps=2, save_steps=1, **QUIET)
    checkpoints = place.folder / "cut" / "checkpoints"
    (checkpoints / "global_step_2").rename(checkpoints / "global_step_2.replaced.tmp")
    (checkpoints / "global_step_3.tmp").mkdir()
    (checkpoints / "global_step_1.removed.tmp").mkdir()
    (checkpoints / ".latest.77.tmp").touch()
    (chosen,) = place.pool.run(
        "tests.distributed.runs:choose", ranks=1, output=str(place.folder / "cut"), wanted="latest"
    )
    assert chosen["chosen"] == str(checkpoints / "global_step_2") and chosen["error"] is None
    assert saved(place.folder / "cut") == [1, 2]


def test_weights_alone(place: Workplace) -> None:
    """`save_only_model` leaves the optimizer out, and resuming from such a checkpoint starts anew with its weights."""
    place.run("weights", 2, max_steps=4, save_steps=4, save_only_model=True)
    checkpoint = place.folder / "weights" / "checkpoints" / "global_step_4"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert not manifest["has_optimizer"]
    rows = place.run("from_weights", 2, max_steps=2, lr=0.0, min_lr=0.0, resume_from_checkpoint=str(checkpoint))
    assert ends(rows) == [(0, None)] * 2
    assert [line for line in rows[0]["log"] if "training starts at step 0" in line]
    assert [record["iteration"] for record in metrics(place.folder / "from_weights")] == [1, 2]
    found, expected = exported(place.folder / "from_weights"), exported(place.folder / "weights")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_exports_at_checkpoints(place: Workplace) -> None:
    place.run("exports", 2, max_steps=4, save_steps=2, save_hf_at_checkpoints=True, save_async=True)
    folder = place.folder / "exports"
    assert sorted(path.name for path in (folder / "hf").iterdir()) == ["global_step_2", "global_step_4"]
    last, end = exported(folder / "hf" / "global_step_4"), exported(folder)
    assert last.keys() == end.keys() and all(torch.equal(last[name], end[name]) for name in end)
    earlier = exported(folder / "hf" / "global_step_2")
    assert not all(torch.equal(earlier[name], end[name]) for name in end)


def test_sigterm_on_all_ranks(place: Workplace) -> None:
    rows = place.run("sigterm", 2, stop_at={0: 3, 1: 3}, save_steps=1000, save_async=True, **QUIET)
    assert ends(rows) == [(143, None)] * 2
    assert saved(place.folder / "sigterm") == [4]
    assert all(f"SIGTERM: stopped after step 4 of {STEPS}" in rank["log"] for rank in rows)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("save_error", ["stop", "continue"])
def test_disk_full(place: Workplace, tmp_path: Path, asynchronous: bool, save_error: str) -> None:
    """The first checkpoint fits on the disk, the second does not."""
    training: dict[str, Any] = {"save_steps": 1, "save_async": asynchronous, "save_error": save_error, **QUIET}
    place.run("one", 2, max_steps=1, **training)
    one = sum(path.stat().st_size for path in (place.folder / "one" / "checkpoints").rglob("*") if path.is_file())
    shutil.rmtree(place.folder / "one")
    output = place.folder / "full"
    with mounted(output / "checkpoints", f"size={one * 3 // 2}") as checkpoints:
        rows = place.run("full", 2, max_steps=6, **training)
        assert saved(output) == [1]
        assert (checkpoints / "latest").read_text() == "global_step_1\n"
        chosen = place.pool.run("tests.distributed.runs:choose", ranks=2, output=str(output), wanted="latest")
        assert [rank["chosen"] for rank in chosen] == [str(checkpoints / "global_step_1")] * 2
    complaints = [[line for line in rank["log"] if "No space left" in line] for rank in rows]
    assert complaints[0] and complaints[0] == complaints[1]
    assert all(line.endswith("; older checkpoints are untouched") for line in complaints[0])
    if save_error == "continue":
        assert ends(rows) == [(0, None)] * 2
        # Steps 2 to 6, each reported.
        assert [line.count("global_step_") > 0 for line in complaints[0]] == [True] * 5
        assert [record["iteration"] for record in metrics(output)] == list(range(1, 7))
    else:
        assert {rank["code"] for rank in rows} == {1}
        assert all("CheckpointError" in rank["error"] and "No space left" in rank["error"] for rank in rows)
        assert len(metrics(output)) <= (3 if asynchronous else 2)
    shutil.rmtree(output)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_rank_that_cannot_write_stops_all(place: Workplace, asynchronous: bool) -> None:
    rows = place.run(
        "one_rank",
        2,
        patches=("second_rank_cannot_write",),
        max_steps=4,
        save_steps=2,
        save_async=asynchronous,
        **QUIET,
    )
    assert all("failed on rank 1: OSError: [Errno 28] No space left on device" in rank["error"] for rank in rows)
    assert saved(place.folder / "one_rank") == []
    shutil.rmtree(place.folder / "one_rank")


def test_read_only_folder(place: Workplace) -> None:
    output = place.folder / "read_only"
    with mounted(output / "checkpoints", "size=1m") as checkpoints:
        place.run("read_only", 2, max_steps=1, save_steps=1, **QUIET)
        subprocess.run(["mount", "-o", "remount,ro", str(checkpoints)], check=True)
        rows = place.run("read_only", 2, max_steps=3, save_steps=1, resume_from_checkpoint="latest", **QUIET)
        assert all("CheckpointError" in rank["error"] and "Read-only file system" in rank["error"] for rank in rows)
        assert saved(output) == [1]


def test_a_file_in_place_of_the_folder(place: Workplace) -> None:
    output = place.folder / "file"
    output.mkdir()
    (output / "checkpoints").write_text("")
    rows = place.run("file", 2, max_steps=2, save_steps=1, **QUIET)
    for rank in rows:
        assert rank["code"] == 2 and f"{output}/checkpoints is a file" in rank["error"]


# fsdp_size on 4 ranks; with 2 replicas, each node holds a whole model, and torch writes each piece only once.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fsdp_size", [None, 2])
def test_nodes_with_disks_of_their_own(place: Workplace, tmp_path: Path, fsdp_size: int | None) -> None:
    """Two nodes of two ranks, simulated by folders of their own: each keeps what its ranks need."""
    (tmp_path / "node_{node}").mkdir()
    data = {**place.data, "data_shared_file_system": False}

    def run(steps: int, **training: Any) -> list[dict[str, Any]]:
        config = write_config(
            tmp_path / "node_{node}" / "run",
            place.model,
            data,
            parallel={"fsdp_size": fsdp_size} if fsdp_size else None,
            **{"stage": "pt", "max_steps": steps, "save_steps": 2, "lr_scheduler_type": "constant", **training},
        )
        text = Path(config).read_text()
        for node in (0, 1):
            target = tmp_path / f"node_{node}"
            target.mkdir(exist_ok=True)
            (target / "run.yaml").write_text(text.replace("{node}", str(node)))
        return place.pool.run(ROW, ranks=4, argv=[config], nodes=2)

    assert ends(run(4)) == [(0, None)] * 4
    for node in (0, 1):
        files = {
            str(path.relative_to(tmp_path / f"node_{node}/run/checkpoints"))
            for path in (tmp_path / f"node_{node}/run/checkpoints/global_step_4").rglob("*.*")
            if path.is_file()
        }
        assert {f"global_step_4/extra_state/extra_state_rank_{rank}.pt" for rank in (2 * node, 2 * node + 1)} <= files
        assert not {f"global_step_4/__{rank}_0.distcp" for rank in range(4) if rank // 2 != node} & files
        copy_run(tmp_path / f"node_{node}" / "run", tmp_path / f"node_{node}" / "whole")
        shutil.rmtree(tmp_path / f"node_{node}" / "run" / "checkpoints" / "global_step_4")
    rows = run(4, resume_from_checkpoint="latest")
    assert ends(rows) == [(0, None)] * 4
    assert [line for line in rows[0]["log"] if "after step 2" in line]
    assert metrics(tmp_path / "node_0" / "run") == metrics(tmp_path / "node_0" / "whole")
    # Fewer ranks on one node see only the pieces of that node: all of them where it holds a whole replica.
    shutil.copytree(tmp_path / "node_0" / "whole", tmp_path / "alone")
    training = {"max_steps": 5, "lr_scheduler_type": "constant", "resume_from_checkpoint": "latest"}
    config = write_config(tmp_path / "alone", place.model, place.data, **{"stage": "pt", **training})
    rows = place.pool.run(ROW, ranks=2, argv=[config])
    if fsdp_size is None:
        assert all("copy the checkpoint's files of all nodes into one folder" in rank["error"] for rank in rows)
        for file in (tmp_path / "node_1/whole/checkpoints/global_step_4").glob("*.distcp"):
            shutil.copy(file, tmp_path / "alone/checkpoints/global_step_4")
        rows = place.pool.run(ROW, ranks=2, argv=[config])
    assert ends(rows) == [(0, None)] * 2
    assert [line for line in rows[0]["log"] if "after step 4 on 2 ranks instead of 4" in line]
