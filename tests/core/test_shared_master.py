"""bf16 parameters as upper halves of fp32 masters: bit for bit what torch's optimizer and a cast by integers give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.pool import RankPool
from tests.support.reference import make_samples, relative, train_reference
from tests.support.toys import TOYS, save_toy
from tests.training.rows import GLOBAL_BATCH

STEPS = 10
DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAPS = [*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather"]


def bits_of(masters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bits of parameters, remainders, and of masters that are joined again; of masters as uint32."""
    from mindspeed_llm.core.shared_master import join, split

    master = torch.from_numpy(masters.view(np.float32).copy())
    parameter = torch.empty(len(masters), dtype=torch.bfloat16)
    remainder = torch.empty(len(masters), dtype=torch.int16)
    split(master, parameter, remainder)
    joined = torch.empty_like(master)
    join(parameter, remainder, joined)
    return (
        parameter.view(torch.int16).numpy().view(np.uint16),
        remainder.numpy(),
        joined.numpy().view(np.uint32),
    )


# Zero, the least and the greatest subnormals, 1, the greatest bf16 and its neighbours below; each with a sign.
UPPER = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3FFF, 0x7F7E, 0x7F7F]


@pytest.mark.parametrize("upper", [upper | sign for upper in UPPER for sign in (0, 0x8000)], ids=hex)
def test_every_lower_half_is_rounded_half_up_and_comes_back(upper: int) -> None:
    masters = np.arange(2**16, dtype=np.uint32) | np.uint32(upper << 16)
    parameters, remainders, joined = bits_of(masters)
    assert (parameters == (masters + 0x8000) >> 16).all()
    assert (joined == masters).all()
    # What a parameter lacks: its distance in last places of fp32.
    assert (masters.astype(np.int64) - (parameters.astype(np.int64) << 16) == remainders).all()


def test_rounding_is_that_of_numbers() -> None:
    """Nearest, and away from zero in the middle: in exact arithmetic, not in bits."""
    generator = np.random.default_rng(0)
    masters = generator.integers(0x00800000, 0x7F000000, 4096, dtype=np.uint32)
    masters[:1024] = masters[:1024] & 0xFFFF0000 | 0x8000
    masters[::2] |= 0x80000000
    values = masters.view(np.float32).astype(np.float64)
    found = (bits_of(masters)[0].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    step = 2.0 ** (np.floor(np.log2(np.abs(values))) - 7)
    expected = np.sign(values) * np.floor(np.abs(values) / step + 0.5) * step
    assert (found == expected).all()
    # Torch's cast goes to the even one in the middle.
    even = torch.from_numpy(masters.view(np.float32).copy()).bfloat16().double().numpy()
    assert 0.4 < (even[:1024] != expected[:1024]).mean() < 0.6 and (even[1024:] == expected[1024:]).all()


def test_infinite_masters_and_those_beyond_bf16_come_back() -> None:
    masters = np.array([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000], dtype=np.uint32)
    parameters, _, joined = bits_of(masters)
    assert (joined == masters).all()
    # As in torch's cast, numbers that are nearer to the next power of two than to the greatest bf16 become infinite.
    assert parameters.tolist() == [0x7F80, 0xFF80, 0x7F80, 0xFF80, 0x7F80]


def test_no_kind_of_nan_becomes_a_number() -> None:
    lower = np.arange(1, 2**16, dtype=np.uint32)
    for upper in (0x7F80, 0xFF80, 0x7FFF, 0xFFFF, 0x7FC0):
        parameters, _, joined = bits_of(lower | np.uint32(upper << 16))
        assert np.isnan(joined.view(np.float32)).all()
        assert np.isnan((parameters.astype(np.uint32) << 16).view(np.float32)).all()


def test_masters_that_are_not_in_memory_cannot_be_taken_for_numbers() -> None:
    from mindspeed_llm.core.shared_master import _SharedMaster

    parameter, master = torch.ones(3, 2, dtype=torch.bfloat16), torch.ones(3, 2)
    shared = _SharedMaster(parameter, master)
    shared.split()
    shared.release()
    assert master.shape == (3, 2) and master.isnan().all() and master.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="single memory location"):
        master.copy_(torch.zeros(3, 2))
    shared.join()
    assert (master == 1).all()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = save_toy("qwen3", tmp_path_factory.mktemp("shared_master") / "model")
    return {
        "folder": str(folder),
        "samples": make_samples(count=STEPS * GLOBAL_BATCH, vocabulary=TOYS["qwen3"]["vocab_size"], no_target_every=5),
    }


def same(found: Any, reference: Any) -> bool:
    if isinstance(found, torch.Tensor):
        return torch.equal(found, reference)
    if isinstance(found, dict):
        return found.keys() == reference.keys() and all(same(found[name], reference[name]) for name in found)
    return found == reference


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "flags"), [(1, []), (2, ["--tensor-model-parallel-size", "2"]), (2, DISTRIBUTED), (2, OVERLAPS)], ids=str
)
def test_ten_steps_are_those_of_torch(rank_pool: RankPool, case: dict[str, Any], ranks: int, flags: list[str]) -> None:
    rows = rank_pool.run(
        "tests.core.shared_master_rows:train", ranks=ranks, steps=STEPS, flags=flags, portion=5000, **case
    )
    for row in rows:
        found, reference = row["found"], row["reference"]
        assert found["masters"] and all(m.dtype == torch.float32 for m in found["masters"].values())
        assert all(w.dtype == torch.bfloat16 for w in found["weights"].values())
        # They have moved to where no bf16 is.
        assert all((master.view(torch.int32) & 0xFFFF).any() for master in found["masters"].values())
        assert same(found, reference)


@pytest.mark.distributed
@pytest.mark.parametrize("mutant", ["half_to_even", "lost_remainder", "no_carry"])
def test_mutants_are_caught(rank_pool: RankPool, case: dict[str, Any], mutant: str) -> None:
    (row,) = rank_pool.run(
        "tests.core.shared_master_rows:train", ranks=1, steps=STEPS, flags=[], portion=2**20, mutant=mutant, **case
    )
    assert not same(row["found"]["weights"], row["reference"]["weights"])
    assert not same(row["found"]["masters"], row["reference"]["masters"])


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, OVERLAPS)], ids=str)
def test_memory_is_less_by_two_bytes_a_parameter(
    rank_pool: RankPool, case: dict[str, Any], ranks: int, flags: list[str]
) -> None:
    portion = 20_000
    measured = [
        rank_pool.run("tests.core.shared_master_rows:memory", ranks=ranks, flags=more, portion=portion, **case)
        for more in (flags, [*flags, "--reuse-fp32-param"])
    ]
    for ordinary, shared in zip(*measured, strict=True):
        assert ordinary["masters"] == shared["masters"]
        # One number each for what stands in the place of the masters.
        slack = 2000
        saved = 2 * ordinary["masters"]
        assert abs(ordinary["between"] - shared["between"] - saved) < slack
        # During the step, too, but for one portion.
        assert ordinary["steps"] == 2 and shared["steps"] > 4
        assert ordinary["during"] - shared["during"] > saved - 4 * max(portion, ordinary["largest"]) - slack


EXPERTS = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]


@pytest.mark.distributed
@pytest.mark.parametrize(("toy", "ranks", "flags"), [("qwen3", 1, []), ("qwen3_moe", 2, [*EXPERTS, *DISTRIBUTED])])
def test_losses_are_those_of_bf16_within_its_noise(
    rank_pool: RankPool, tmp_path: Path, toy: str, ranks: int, flags: list[str]
) -> None:
    """The noise is what bf16 alone does to losses of fp32."""
    steps, folder = 8, save_toy(toy, tmp_path / "model")
    samples = make_samples(count=steps * GLOBAL_BATCH, vocabulary=TOYS[toy]["vocab_size"], no_target_every=5)
    reference = train_reference(folder, samples, steps=steps, global_batch=GLOBAL_BATCH).losses
    job = {"ranks": ranks, "folder": str(folder), "samples": samples, "steps": steps}
    ordinary, shared = (
        rank_pool.run("tests.training.rows:train", flags=["--bf16", *flags, *more], **job)[0]["losses"]
        for more in ([], ["--reuse-fp32-param"])
    )
    noise = max(map(relative, ordinary, reference))
    assert 1e-4 < noise < 2e-2
    assert max(map(relative, shared, ordinary)) < noise
    # The weights of the first step are those of the file.
    assert shared[0] == ordinary[0] and shared != ordinary
