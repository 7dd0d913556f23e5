"""Process group and mesh, on the pool of gloo ranks and in one process."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from mindspeed_llm.errors import UserError
from mindspeed_llm.platform import distributed
from tests.support.pool import RankPool


@pytest.fixture
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_torchrun")
def test_one_process_needs_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_DEVICE", "cpu")
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (0, 1, 0)
    assert distributed.init_process_group(timeout_s=60)
    try:
        assert not distributed.init_process_group(), "an existing group is kept"
        assert distributed.device_mesh((1, 1), ("replicate", "shard")).mesh_dim_names == ("replicate", "shard")
        with pytest.raises(AssertionError, match="does not cover 1 ranks"):
            distributed.device_mesh((2,), ("shard",))
    finally:
        distributed.destroy_process_group()
    assert not dist.is_initialized()
    distributed.destroy_process_group()


def test_the_environment_answers_before_there_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (3, 4, 1)
    assert not distributed.is_rank_zero()
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(UserError, match="RANK='three': expected a whole number"):
        distributed.rank()
    monkeypatch.delenv("RANK")
    with pytest.raises(UserError, match="RANK is not set"):
        distributed.init_process_group()


def mesh_row() -> tuple[int, int, list[int], list[int], float]:
    """Runs on every rank: its place in a 2x2 mesh, the ranks of both axes, and a sum over the inner axis."""
    assert not distributed.init_process_group()
    mesh = distributed.device_mesh((2, 2), ("replicate", "shard"))
    assert mesh.device_type == "cpu"
    total = torch.tensor(float(distributed.rank()))
    dist.all_reduce(total, group=mesh["shard"].get_group())
    ranks = [dist.get_process_group_ranks(mesh[name].get_group()) for name in ("replicate", "shard")]
    return distributed.rank(), distributed.world_size(), *ranks, total.item()


@pytest.mark.distributed
def test_mesh_axes_follow_the_rank_order(rank_pool: RankPool) -> None:
    rows = rank_pool.run("tests.platform.test_distributed:mesh_row", ranks=4)
    assert rows == [
        (0, 4, [0, 2], [0, 1], 1.0),
        (1, 4, [1, 3], [0, 1], 1.0),
        (2, 4, [0, 2], [2, 3], 5.0),
        (3, 4, [1, 3], [2, 3], 5.0),
    ]


@pytest.mark.distributed
def test_all_wait_for_the_last(rank_pool: RankPool) -> None:
    rows = rank_pool.run("tests.platform.test_distributed:waiting_row", ranks=4)
    for turn in (0, 1):
        assert max(arrived[turn] for arrived, _ in rows) <= min(left[turn] for _, left in rows)


def waiting_row() -> tuple[list[float], list[float]]:
    """When a rank comes and when it goes on, twice; another rank is the last one each time."""
    arrived, left = [], []
    for last in (1, 3):
        time.sleep(1.0 if distributed.rank() == last else 0.0)
        arrived.append(time.monotonic())
        distributed.wait_for_all()
        left.append(time.monotonic())
    return arrived, left
