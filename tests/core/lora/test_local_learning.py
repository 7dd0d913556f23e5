"""Local updates equal Oja's rule in a few lines of torch on transformers' model, for any topology."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.core.lora.halves import Cut, Halves, initial_b
from mindspeed_llm.core.lora.local_learning import LocalRule, LocalUpdates
from mindspeed_llm.tasks.checkpoint.main import main as convert
from tests.core.lora import local_reference, reference
from tests.core.lora.assembled import hub_adapter
from tests.core.lora.local_reference import FALLING
from tests.core.lora.reference import ALPHA, RANK
from tests.core.lora.test_checkpoints import expect_same
from tests.core.lora.test_parity import ALLTOALL, EP, FULL, FUSED, OVERLAPS, PARTS, PP, SP, TP, name_of
from tests.support.pool import RankPool
from tests.support.reference import Trace, assert_parity, make_samples
from tests.support.toys import VOCABULARY, save_toy

pytestmark = pytest.mark.distributed
STEPS, RATE, RATIO, MICRO_BATCHES = 3, 2e-3, 2.0, 4
ROW = "tests.core.lora.local_rows:train"
# (toy, ranks, targets, final layer, flags); the first four are part of each run of CI.
ROWS: list[tuple[str, int, list[str], int, list[str]]] = [
    # Three trained layers, of which two are recomputed together.
    ("llama", 1, FUSED, 0, [*FULL[:-1], "2"]),
    ("llama", 2, PARTS, 1, [TP, "2", SP]),
    ("llama", 2, FUSED, 2, [PP, "2", *FULL]),
    ("llama", 2, PARTS, 1, OVERLAPS),
    ("llama", 2, FUSED, 1, [TP, "2", "--recompute-norm", "--recompute-activation-function"]),
    ("llama", 2, FUSED, 1, [PP, "2", *OVERLAPS]),
    ("llama", 2, PARTS, 1, [PP, "2", "--noop-layers", "0,3"]),
    ("llama", 2, FUSED, 1, [PP, "2", *OVERLAPS, "--num-layers-per-virtual-pipeline-stage", "1"]),
    ("llama", 4, FUSED, 2, [PP, "2", TP, "2", SP, *FULL[:2], "--recompute-method", "block", *FULL[4:]]),
    ("qwen3_moe", 2, ["linear_q", "linear_proj"], 1, [EP, "2", *ALLTOALL]),
]


class Case:
    """A toy with an adapter in PEFT's files, and what the reference makes of it."""

    def __init__(self, toy: str, targets: list[str], final_layer: int, folder: Path) -> None:
        self.folder, self.targets, self.final_layer = save_toy(toy, folder / "model"), targets, final_layer
        self.adapter = reference.make_adapter(self.folder, folder / "adapter", targets)
        self.begun = {
            name.removeprefix("base_model.model."): value
            for name, value in load_file(self.adapter / "adapter_model.safetensors").items()
        }
        self.trace = local_reference.train(
            reference.Added(self.folder, self.begun, targets),
            make_samples(count=64, vocabulary=VOCABULARY),
            final_layer=final_layer,
            rate=RATE,
            ratio=RATIO,
            steps=STEPS,
        )

    def flags(self, flags: list[str]) -> list[str]:
        lora = ["--lora-target-modules", *self.targets, "--lora-r", str(RANK), "--lora-alpha", str(ALPHA)]
        lora += ["--adam-eps", str(reference.RECIPE["eps"]), "--lu-lora-final-layer-index", str(self.final_layer)]
        lora += ["--lu-lora-lr", str(RATE), "--lu-lora-lr-ratio", str(RATIO), *FALLING]
        return [*flags, *lora, "--load", str(self.folder), "--lora-load", str(self.adapter)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Cases, made once."""
    made: dict[Any, Case] = {}

    def case(toy: str, targets: list[str], final_layer: int) -> Case:
        key = (toy, final_layer, *targets)
        if key not in made:
            made[key] = Case(toy, targets, final_layer, tmp_path_factory.mktemp("local"))
        return made[key]

    return case


def run(rank_pool: RankPool, case: Case, ranks: int, flags: list[str], **options: Any) -> list[dict[str, Any]]:
    options.setdefault("steps", STEPS)
    rows = rank_pool.run(ROW, ranks=ranks, folder=str(case.folder), flags=case.flags(flags), **options)
    assert all(row["error"] is None for row in rows), rows[0]["error"]
    return rows


def local_updates_apart(found: dict[str, torch.Tensor], case: Case) -> float:
    """How far the farthest local update is from the reference's, relative to the latter."""
    theirs = case.trace.weights
    names = [name for name in theirs if int(name.split(".")[2]) <= case.final_layer]
    return max(float((found[name] - theirs[name]).norm() / (theirs[name] - case.begun[name]).norm()) for name in names)


@pytest.mark.parametrize(
    ("toy", "ranks", "targets", "final_layer", "flags"),
    [*ROWS[:4], *(pytest.param(*row, marks=pytest.mark.sampled(6)) for row in ROWS[4:])],
    ids=name_of,
)
def test_equals_ojas_rule_and_backpropagation(
    rank_pool: RankPool, cases: Any, toy: str, ranks: int, targets: list[str], final_layer: int, flags: list[str]
) -> None:
    case = cases(toy, targets, final_layer)
    rows = run(rank_pool, case, ranks, flags, evaluates=True)
    weights = hub_adapter(case.folder, rows)
    found = Trace(losses=rows[0]["losses"], grad_norms=rows[0]["grad_norms"], weights=weights)
    assert_parity(found, case.trace)
    assert local_updates_apart(weights, case) < 2e-4
    for row in rows:
        assert row["frozen"] == row["frozen_after"]
        # Computed once in each micro batch, without gradients coming in; they begin behind the last local layer alone.
        numbers = {number for number, _, _ in row["forwards"]}
        assert len(row["forwards"]) == len(numbers) * STEPS * MICRO_BATCHES // row["args"].data_parallel_size
        assert not any(of_input for _, of_input, _ in row["forwards"])
        assert {number for number, _, of_output in row["forwards"] if of_output} <= {max(numbers, default=0)}


@pytest.mark.parametrize(
    ("fault", "ranks", "targets", "flags"),
    [
        ("sums_over_all_ranks_of_a_layer", 2, FUSED, [TP, "2"]),
        ("of_this_rank_alone", 2, PARTS, [TP, "2", SP]),
        ("of_this_rank_alone", 2, PARTS, []),
        ("tokens_of_one_micro_batch", 1, FUSED, FULL),
    ],
    ids=name_of,
)
def test_faults_are_caught(
    rank_pool: RankPool, cases: Any, fault: str, ranks: int, targets: list[str], flags: list[str]
) -> None:
    case = cases("llama", targets, 1)
    rows = run(rank_pool, case, ranks, flags, fault=fault)
    assert local_updates_apart(hub_adapter(case.folder, rows, copies_alike=False), case) > 1e-2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("targets", "flags"), [(FUSED, [TP, "2", "--bf16"]), (PARTS, [PP, "2", *OVERLAPS])], ids=name_of
)
def test_goes_on_bit_for_bit(rank_pool: RankPool, tmp_path: Path, targets: list[str], flags: list[str]) -> None:
    model = save_toy("llama", tmp_path / "model")
    words = [*flags, "--lora-target-modules", *targets, "--lora-r", str(RANK), "--lora-alpha", str(ALPHA), *FALLING]
    words += ["--lu-lora-final-layer-index", "1", "--lu-lora-lr", str(RATE), "--lu-lora-lr-ratio", str(RATIO)]
    from_model = [*words, "--load", str(model)]

    def go(flags: list[str], **options: Any) -> list[dict[str, Any]]:
        return rank_pool.run(ROW, ranks=2, folder=str(model), flags=flags, **options)

    saves = [(2, kind, str(tmp_path / kind)) for kind in ("torch", "torch_dist")]
    alone = [(2, kind, str(tmp_path / "alone" / kind)) for kind in ("torch", "torch_dist")]
    whole = go(from_model, steps=3, saves=saves)
    go([*from_model, "--lora-ckpt-filter"], steps=2, saves=alone)
    for kind in ("torch", "torch_dist"):
        expect_same(go([*words, "--load", str(tmp_path / kind)], steps=3), whole, steps=1)
        expect_same(go([*from_model, "--lora-load", str(tmp_path / "alone" / kind)], steps=3), whole, steps=1)
    other = [*from_model, "--lora-load", str(tmp_path / "alone" / "torch"), "--lu-lora-final-layer-index", "0"]
    [error, _] = [row["error"] for row in go(other, steps=3)]
    assert error is not None
    assert "--lu-lora-final-layer-index 1" in error
    if "--bf16" in flags:
        check_files(model, tmp_path, whole)


def check_files(model: Path, folder: Path, rows: list[dict[str, Any]]) -> None:
    """In a model of bf16, local adapters begin as told and are kept, saved and exported in fp32."""
    begun, saved = hub_adapter(model, rows, "begun"), folder / "alone" / "torch"
    local = [name for name in begun if int(name.split(".")[2]) <= 1]
    for name, values in begun.items():
        if ".lora_B." in name:
            assert abs(float(values.std()) - (1e-4 if name in local else 0.0)) < 0.2e-4
    for row in rows:
        for name, values in row["states"][0].items():
            assert values.dtype == (torch.float32 if int(name.split(".")[2]) <= 1 else torch.bfloat16)
    export = ["--load-model-type", "mg", "--load-dir", str(saved), "--save-model-type", "hf", "--save-lora-to-hf"]
    convert([*export, "--hf-cfg-dir", str(model), "--save-dir", str(folder / "peft")])
    exported = load_file(folder / "peft" / "adapter_model.safetensors")
    content = torch.load(next(saved.glob("iter_*/mp_rank_00/*.pt")), weights_only=False)["model"]
    a = content["decoder.layers.0.self_attention.linear_qkv.lora_A.default.weight"]
    assert torch.equal(exported["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"], a)
    assert a.dtype == torch.float32
    assert not torch.equal(a, a.bfloat16().float())


def test_adapters_that_would_never_move_are_refused(rank_pool: RankPool, cases: Any, tmp_path: Path) -> None:
    """With B = 0 Oja's rule has nothing to strengthen."""
    case = cases("llama", PARTS, 1)
    fresh = Path(shutil.copytree(case.adapter, tmp_path / "fresh")) / "adapter_model.safetensors"
    tensors = load_file(fresh)
    save_file({name: value * (".lora_A." in name) for name, value in tensors.items()}, fresh)
    flags = [*case.flags([PP, "2"]), "--lora-load", str(fresh.parent)]
    rows = rank_pool.run(ROW, ranks=2, folder=str(case.folder), flags=flags, steps=1)
    for row in rows:
        assert row["error"] is not None
        assert f"--lora-load {fresh.parent}: its B are zeros" in row["error"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("targets", [FUSED, PARTS], ids=name_of)
def test_local_adapters_begin_alike_on_any_topology(rank_pool: RankPool, tmp_path: Path, targets: list[str]) -> None:
    folder = save_toy("llama", tmp_path / "model")
    words = ["--lora-target-modules", *targets, "--lora-r", str(RANK), "--load", str(folder)]
    words += ["--lu-lora-final-layer-index", "2"]
    alone, split = (
        hub_adapter(
            folder, rank_pool.run(ROW, ranks=count, folder=str(folder), flags=[*flags, *words], steps=0), "begun"
        )
        for count, flags in ((1, []), (2, [TP, "2"]))
    )
    for name, values in alone.items():
        assert torch.equal(values, split[name]), name


def test_rows_become_an_orthonormal_basis_of_the_principal_subspace() -> None:
    generator = torch.Generator().manual_seed(0)
    # Twelve directions of different variance, turned at random.
    turn, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator))
    tokens = torch.randn(400, 12, generator=generator) * torch.linspace(1.5, 0.2, 12) @ turn
    cut = Cut(axis=0, index=0, count=1, group=SimpleNamespace(size=lambda: 1))
    halves = Halves("any", seed=0, rank=3, inputs=12, outputs=20, like=torch.zeros(0), cut=cut)
    halves.begin_b(initial_b("any", 0, 3, 20))
    updates = LocalUpdates([rule := LocalRule([halves], is_column=True, sequence_parallel=False)], cut.group)
    for _ in range(1500):
        updates.begin()
        for part in tokens.view(4, 100, 1, 12):
            rule.add(part, part @ halves.a.t())
        updates.apply(rate_of_a=0.1, rate_of_b=0.1)
    _, directions = torch.linalg.eigh(tokens.t() @ tokens / 400)
    principal = directions[:, -3:]
    for basis in (halves.a.t(), halves.b):
        assert (basis.t() @ basis - torch.eye(3)).abs().max() < 1e-3
    assert (halves.a.t() @ halves.a - principal @ principal.t()).abs().max() < 1e-3


def test_sums_that_fp16_does_not_have() -> None:
    cut = Cut(axis=0, index=0, count=1, group=SimpleNamespace(size=lambda: 1))
    halves = Halves("any", seed=0, rank=2, inputs=4, outputs=5, like=torch.zeros(0), cut=cut)
    rule = LocalRule([halves], is_column=True, sequence_parallel=False)
    rule.begin()
    rule.add(torch.full((4096, 1, 4), 20.0).half(), torch.full((4096, 1, 2), 2.0).half())
    [mean] = rule.means()
    assert mean.tolist() == [[40.0] * 4] * 2
