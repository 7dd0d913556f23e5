"""bf16 parameters as upper halves of fp32 masters: bit for bit what torch's optimizer and a cast by integers give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_llm.platform import cuda_names
from tests.core.shared_master_rows import half_up
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


@pytest.mark.parametrize(("portion", "per_parameter", "calls"), [(8, True, 3), (2**20, True, 1), (8, False, 1)])
def test_every_parameter_takes_one_step(
    monkeypatch: pytest.MonkeyPatch, portion: int, per_parameter: bool, calls: int
) -> None:
    """Also one that is fp32 itself; and optimizers that count steps for a group of parameters are called once."""
    cuda_names.install()
    try:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

        from mindspeed_llm.core import shared_master

        monkeypatch.setattr(shared_master, "PORTION", portion)
        if not per_parameter:
            monkeypatch.setattr(shared_master, "_counts_steps_per_parameter", lambda inner: False)
        torch.manual_seed(3)
        dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
        parameters = [torch.nn.Parameter(torch.randn(2, 4).to(dtype)) for dtype in dtypes]
        expected = [torch.nn.Parameter(parameter.detach().float().clone()) for parameter in parameters]
        settings = {"lr": 1e-2, "weight_decay": 0.1}
        inner, reference = torch.optim.AdamW(parameters, **settings), torch.optim.AdamW(expected, **settings)
        part = Float16OptimizerWithFloat16Params(inner, OptimizerConfig(bf16=True), None, lambda *_: None)
        shared_master.share_masters(part)
        made: list[None] = []
        inner.register_step_post_hook(lambda *_: made.append(None))
        for _ in range(2):
            for parameter, other in zip(parameters, expected, strict=True):
                parameter.main_grad = other.grad = torch.randn(2, 4)
            part.prepare_grads()
            part.step_with_ready_grads()
            reference.step()
        assert len(made) == 2 * calls
        for parameter, dtype, other in zip(parameters, dtypes, expected, strict=True):
            values = other.detach()
            assert torch.equal(parameter, half_up(values) if dtype == torch.bfloat16 else values)
    finally:
        cuda_names.uninstall()


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
@pytest.mark.sampled(2)
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


STAGES = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
STAGES += ["--overlap-param-gather-with-optimizer-step"]
EXPERTS = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("toy", "ranks", "flags"),
    [("qwen3", 1, []), ("qwen3_moe", 2, [*EXPERTS, *DISTRIBUTED]), ("qwen3", 4, [*STAGES, *OVERLAPS])],
)
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


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, OVERLAPS)], ids=str)
def test_resumes_bit_for_bit(
    rank_pool: RankPool, case: dict[str, Any], tmp_path: Path, ranks: int, flags: list[str], kind: str
) -> None:
    for row in resumed(rank_pool, case, tmp_path, ranks, flags, kind, (True, True)):
        assert row["whole"] == row["resumed"]
        for name in ("weights", "masters"):
            assert same(row[f"loaded {name}"], row[f"saved {name}"])
            assert same(row[f"resumed {name}"], row[f"whole {name}"])


@pytest.mark.distributed
def test_weights_alone_are_masters_too(rank_pool: RankPool, case: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint's weights without its optimizer are what the masters are from then on."""
    for row in resumed(rank_pool, case, tmp_path, 2, DISTRIBUTED, "torch", (True, True), no_load_optim=True):
        assert same(row["loaded weights"], row["saved weights"])
        assert not any((master.view(torch.int32) & 0xFFFF).any() for master in row["loaded masters"].values())
        assert not same(row["resumed masters"], row["loaded masters"])


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_a_checkpoint_goes_on_without_the_flag(
    rank_pool: RankPool, case: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    for row in resumed(rank_pool, case, tmp_path, 2, DISTRIBUTED, kind, (True, False)):
        # True masters, which are no bf16.
        assert same(row["loaded masters"], row["saved masters"])
        assert any((master.view(torch.int32) & 0xFFFF).any() for master in row["loaded masters"].values())
        assert same(row["loaded weights"], row["saved weights"])
        assert row["whole"][0] == row["resumed"][0]
        assert max(map(relative, row["whole"][1], row["resumed"][1])) < 1e-2


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "mutant"), [("torch", None), ("torch_dist", None), ("torch", "not_gathered")])
def test_a_checkpoint_without_the_flag_goes_on_with_it(
    rank_pool: RankPool, case: dict[str, Any], tmp_path: Path, kind: str, mutant: str | None
) -> None:
    """Parameters that were rounded to even are rounded half up, on all ranks and before the first step."""
    rows = resumed(rank_pool, case, tmp_path, 2, DISTRIBUTED, kind, (False, True), ties=True, mutant=mutant)
    assert all(same(row["loaded masters"], row["saved masters"]) for row in rows)
    loaded, saved = rows[0]["loaded weights"], rows[0]["saved weights"]
    masters = {
        name: torch.cat([row["loaded masters"].get(name, torch.zeros(0)).flatten() for row in rows]).view(weight.shape)
        for name, weight in loaded.items()
    }
    assert not same(loaded, saved) and same(saved, {name: master.bfloat16() for name, master in masters.items()})
    rounded = {name: half_up(master) for name, master in masters.items()}
    assert all(same(row["loaded weights"], rounded) for row in rows) == (mutant is None)


def resumed(
    rank_pool: RankPool,
    case: dict[str, Any],
    folder: Path,
    ranks: int,
    flags: list[str],
    kind: str,
    shared: tuple[bool, bool],
    **options: Any,
) -> list[dict[str, Any]]:
    """Each rank's facts of an interrupted run."""
    return rank_pool.run(
        "tests.core.shared_master_rows:interrupted",
        ranks=ranks,
        flags=flags,
        kind=kind,
        target=str(folder / "saved"),
        shared=shared,
        **options,
        **case,
    )
