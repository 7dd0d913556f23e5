"""Runs with adapters go on bit for bit from their checkpoints, and peft reads what they have trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_llm.tasks.checkpoint.main import main as convert
from tests.core.lora import reference
from tests.core.lora.assembled import hub_adapter
from tests.core.lora.reference import ALPHA, RANK
from tests.core.lora.test_parity import ALLTOALL, EP, ETP, FUSED, OVERLAPS, PARTS, PP, ROW, SP, TP
from tests.support.pool import RankPool
from tests.support.toys import save_toy

pytestmark = pytest.mark.distributed
MOE = ["linear_qkv", "linear_fc1", "linear_fc2"]
VPP = "--num-layers-per-virtual-pipeline-stage"
PADDED = ["--padded-vocab-size", "512"]
GROUPED = ["--moe-grouped-gemm", *ALLTOALL]


def lora(targets: list[str], *more: str) -> list[str]:
    return ["--lora-target-modules", *targets, "--lora-r", str(RANK), "--lora-alpha", str(ALPHA), *more]


def run(rank_pool: RankPool, ranks: int, model: Path, flags: list[str], **options: Any) -> list[dict[str, Any]]:
    return rank_pool.run(ROW, ranks=ranks, folder=str(model), flags=flags, **options)


def expect_same(found: list[dict[str, Any]], whole: list[dict[str, Any]], *, steps: int) -> None:
    """The last `steps` steps, and the adapters behind them, bit for bit."""
    for mine, theirs in zip(found, whole, strict=True):
        assert mine["error"] is None, mine["error"]
        assert mine["start"] == 2
        assert mine["losses"] == theirs["losses"][-steps:]
        assert mine["grad_norms"] == theirs["grad_norms"][-steps:]
        assert mine["frozen"] == theirs["frozen"]
        for chunk, expected in zip(mine["states"], theirs["states"], strict=True):
            assert chunk.keys() == expected.keys()
            assert all(torch.equal(chunk[name], value) for name, value in expected.items())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("toy", "ranks", "targets", "flags"),
    [
        ("llama", 2, PARTS, [TP, "2", SP]),
        ("qwen3_moe", 2, MOE, [EP, "2", *GROUPED, *OVERLAPS]),
        ("llama_tied", 2, FUSED, ["--pipeline-model-parallel-size", "2", "--noop-layers", "0,1,2,3"]),
        ("llama", 2, PARTS, ["--bf16", "--reuse-fp32-param", *OVERLAPS]),
        ("qwen3_moe", 2, MOE[1:], [EP, "2", *GROUPED, "--use-distributed-optimizer"]),
    ],
)
def test_goes_on_bit_for_bit(
    rank_pool: RankPool, tmp_path: Path, toy: str, ranks: int, targets: list[str], flags: list[str]
) -> None:
    model = save_toy(toy, tmp_path / "model")
    words = [*flags, *lora(targets)]
    saves = [(2, kind, str(tmp_path / kind)) for kind in ("torch", "torch_dist")]
    whole = run(rank_pool, ranks, model, [*words, "--load", str(model)], steps=3, saves=saves)
    for kind in ("torch", "torch_dist"):
        # The checkpoint has the model, too.
        again = run(rank_pool, ranks, model, [*words, "--load", str(tmp_path / kind)], steps=3)
        expect_same(again, whole, steps=1)
    alone = [(2, kind, str(tmp_path / "alone" / kind)) for kind in ("torch", "torch_dist")]
    words += ["--load", str(model)]
    run(rank_pool, ranks, model, [*words, "--lora-ckpt-filter"], steps=2, saves=alone)
    for kind in ("torch", "torch_dist"):
        sizes = [
            sum(path.stat().st_size for path in (folder / kind).rglob("*") if path.is_file())
            for folder in (tmp_path / "alone", tmp_path)
        ]
        assert sizes[0] < sizes[1]
        again = run(rank_pool, ranks, model, [*words, "--lora-load", str(tmp_path / "alone" / kind)], steps=3)
        expect_same(again, whole, steps=1)


def test_other_ranks_go_on_from_a_distributed_checkpoint(rank_pool: RankPool, tmp_path: Path) -> None:
    model = save_toy("qwen3_moe", tmp_path / "model")
    words = [*lora(MOE, "--lora-ckpt-filter"), "--load", str(model)]
    saves = [(2, "torch_dist", str(tmp_path / "saved"))]
    flags = [TP, "2", SP, *GROUPED, "--expert-tensor-parallel-size", "2"]
    whole = run(rank_pool, 2, model, [*flags, *words], steps=3, saves=saves)
    again = run(rank_pool, 1, model, [*words, *GROUPED, "--lora-load", str(tmp_path / "saved")], steps=3)
    assert again[0]["error"] is None, again[0]["error"]
    assert abs(again[0]["losses"][0] / whole[0]["losses"][2] - 1) < 1e-6
    before, after = hub_adapter(model, whole), hub_adapter(model, again)
    for name, values in before.items():
        assert (after[name] - values).norm() / values.norm() < 1e-5, name


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("toy", "ranks", "targets", "flags"),
    [
        ("llama", 2, PARTS, [TP, "2", SP]),
        ("llama", 2, FUSED, [TP, "2"]),
        ("qwen3_moe", 2, PARTS, [EP, "2", *ALLTOALL]),
        ("qwen3_moe", 2, FUSED, [EP, "2", *GROUPED]),
        # The first stage has no layers, and no adapters.
        ("llama_tied", 2, FUSED, [PP, "2", "--noop-layers", "0,1,2,3"]),
        ("qwen3_moe", 4, PARTS, [TP, "2", SP, ETP, "1", EP, "2", PP, "2", *ALLTOALL]),
        ("qwen3", 4, FUSED, [PP, "2", VPP, "1", *OVERLAPS]),
    ],
)
def test_peft_reads_what_was_trained(
    rank_pool: RankPool, tmp_path: Path, toy: str, ranks: int, targets: list[str], flags: list[str]
) -> None:
    model = save_toy(toy, tmp_path / "model")
    saved = {kind: tmp_path / kind for kind in ("torch", "torch_dist")}
    words = [*flags, *lora(targets, "--lora-ckpt-filter"), "--load", str(model), "--lr", "0.01"]
    words += ["--save-lora-to-hf", "--save", str(tmp_path)]
    rows = run(rank_pool, ranks, model, words, steps=2, saves=[(2, kind, str(path)) for kind, path in saved.items()])
    assert rows[0]["error"] is None, rows[0]["error"]
    trained = hub_adapter(model, rows)

    common = ["--save-model-type", "hf", "--hf-cfg-dir", str(model)]
    alone = ["--load-model-type", "mg", "--load-dir", str(saved["torch"]), "--save-lora-to-hf"]
    convert([*common, *alone, "--save-dir", str(tmp_path / "peft")])
    for path in saved.values():
        # What the run has written itself, in checkpoints of either format.
        of_run = path / "iter_0000002" / "hf_adapter"
        assert sorted(file.name for file in of_run.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        for file in of_run.iterdir():
            assert file.read_bytes() == (tmp_path / "peft" / file.name).read_bytes(), file
        listed = json.loads((path / "iter_0000002" / "manifest.json").read_text())["files"]
        assert {f"hf_adapter/{file.name}" for file in of_run.iterdir()} <= listed.keys()
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for name, values in trained.items():
        assert torch.equal(found[f"base_model.model.{name}"], values), name
    to_mg = ["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", str(model)]
    convert([*to_mg, "--save-dir", str(tmp_path / "base")])
    merge = ["--load-model-type", "mg", "--load-dir", str(tmp_path / "base"), "--lora-load", str(saved["torch"])]
    convert([*common, *merge, "--save-dir", str(tmp_path / "merged")])

    def logits(found: Any) -> torch.Tensor:
        # In fp64, so that the order of sums plays no part.
        with torch.no_grad():
            return found.double().eval()(torch.arange(3, 67).view(2, 32)).logits

    if "moe" not in toy:
        unmerged = logits(reference.with_peft(model, saved["torch_dist"] / "iter_0000002" / "hf_adapter"))
    else:
        # Transformers stacks experts, where peft finds no layers.
        tensors = {name.removeprefix("base_model.model."): value for name, value in found.items()}
        unmerged = logits(reference.Added(model, tensors, targets))
    merged = logits(reference.load(tmp_path / "merged"))
    before = logits(reference.load(model))
    assert (merged - before).abs().max() > 0.01 * before.std()
    assert (merged - unmerged).abs().max() < 1e-5 * unmerged.std()


def test_a_model_in_a_checkpoint_gets_new_adapters(rank_pool: RankPool, tmp_path: Path) -> None:
    model = save_toy("llama", tmp_path / "model")
    flags = ["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", str(model)]
    convert([*flags, "--save-dir", str(tmp_path / "base"), "--target-tensor-parallel-size", "2", *PADDED])
    words = [TP, "2", *lora(FUSED)]
    adapter = reference.make_adapter(model, tmp_path / "adapter", FUSED)
    peft = ["--lora-load", str(adapter)]
    from_files = run(rank_pool, 2, model, [*words, "--load", str(model), *peft], steps=1)
    base = ["--load", str(tmp_path / "base")]
    from_checkpoint = run(rank_pool, 2, model, [*words, *base, *peft, "--model-from-hf", str(model)], steps=1)
    new = run(rank_pool, 2, model, [*words, *base], steps=1)
    for mine, theirs, fresh in zip(from_checkpoint, from_files, new, strict=True):
        assert mine["error"] is None, mine["error"]
        assert fresh["error"] is None, fresh["error"]
        assert mine["losses"] == theirs["losses"]
        assert mine["frozen"] == theirs["frozen"] == fresh["frozen"]
        assert fresh["start"] == 0
    # PEFT's files name layers of a Hugging Face model.
    [row, _] = run(rank_pool, 2, model, [*words, *base, *peft], steps=0)
    assert "--model-from-hf" in row["error"]


def test_a_run_lends_its_model(rank_pool: RankPool, tmp_path: Path) -> None:
    model = save_toy("llama", tmp_path / "model")
    base, saved = str(tmp_path / "base"), str(tmp_path / "saved")
    run(rank_pool, 1, model, ["--load", str(model), "--seed", "1"], steps=1, saves=[(1, "torch", base)])

    def lent(*more: str, **options: Any) -> dict[str, Any]:
        words = [*lora(FUSED, "--lora-ckpt-filter"), "--load", base, *more]
        return run(rank_pool, 1, model, words, **options)[0]

    def says_samples(row: dict[str, Any]) -> list[str]:
        return [line for line in row["log"] if "the samples are not those of the checkpoint" in line]

    # Of a model's checkpoint neither the position nor the data count.
    whole = lent("--seed", "2", steps=3, saves=[(2, "torch", saved), (3, "torch", saved)])
    assert whole["error"] is None, whole["error"]
    assert (whole["start"], says_samples(whole)) == (0, [])
    # A step is one of the run that goes on: there is no step 2 of the model.
    again = lent("--lora-load", saved, "--ckpt-step", "2", "--seed", "2", steps=3)
    expect_same([again], [whole], steps=1)
    assert not says_samples(again)
    [said] = says_samples(lent("--lora-load", saved, "--seed", "3", steps=0))
    assert "--seed 3 instead of 2" in said
    # PEFT's files have no steps.
    adapter = str(reference.make_adapter(model, tmp_path / "adapter", FUSED))
    peft = ["--lora-load", adapter, "--model-from-hf", str(model)]
    assert f"--ckpt-step 2: {base} has no" in lent(*peft, "--ckpt-step", "2", steps=0)["error"]
    assert lent(*peft, "--ckpt-step", "1", steps=0)["error"] is None


def test_a_checkpoint_is_not_lost_with_its_export(rank_pool: RankPool, tmp_path: Path) -> None:
    model, saved, hub = save_toy("llama", tmp_path / "model"), tmp_path / "saved", tmp_path / "hub"
    somebodys = hub / "iter_0000001" / "adapter_model.safetensors"
    somebodys.parent.mkdir(parents=True)
    somebodys.write_bytes(b"of somebody")
    words = [*lora(FUSED, "--save-lora-to-hf", "--hf-save-dir", str(hub), "--save", str(saved))]
    (first,) = run(rank_pool, 1, model, [*words, "--load", str(model)], steps=1, saves=[(1, "torch", str(saved))])
    assert f"--hf-save-dir {hub / 'iter_0000001'} holds adapter_model.safetensors" in first["error"]
    assert [path for path in hub.rglob("*") if path.is_file()] == [somebodys]
    assert somebodys.read_bytes() == b"of somebody"
    # A run that comes to the same step again replaces what it has written there.
    again = [*words, "--load", str(saved), "--hf-cfg-dir", str(model)]
    for step in ([], ["--ckpt-step", "1"]):
        (row,) = run(rank_pool, 1, model, [*again, *step], steps=2, saves=[(2, "torch_dist", str(saved))])
        assert (row["error"], row["start"]) == (None, 1)
    names = sorted(path.name for path in (hub / "iter_0000002").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors", "conversion_report.json"]
    found = load_file(hub / "iter_0000002" / "adapter_model.safetensors")
    for name, values in hub_adapter(model, [row]).items():
        assert torch.equal(found[f"base_model.model.{name}"], values), name
    assert not list(saved.rglob("hf_adapter"))


def test_what_does_not_belong_together_is_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    model, other = save_toy("llama", tmp_path / "model"), save_toy("llama_odd3", tmp_path / "other")
    words = [*lora(FUSED, "--lora-ckpt-filter"), "--load", str(model)]
    run(rank_pool, 1, model, words, steps=1, saves=[(1, "torch", str(tmp_path / "saved"))])
    saved = ["--lora-load", str(tmp_path / "saved")]
    peft = str(reference.make_adapter(model, tmp_path / "peft", PARTS))
    of_other = str(reference.make_adapter(other, tmp_path / "of_other", PARTS))

    def error(folder: Path, flags: list[str]) -> str:
        [row] = run(rank_pool, 1, folder, flags, steps=0)
        assert row["error"] is not None
        assert row["error"].startswith("UserError: "), row["error"]
        return row["error"]

    load = ["--load", str(model)]
    assert "--lora-alpha 6.0" in error(model, [*words, "--lora-alpha", "5", *saved])
    assert "--lora-r 4" in error(model, [*words, "--lora-r", "8", *saved])
    assert "linear_fc1 linear_fc2 linear_proj linear_qkv" in error(model, [*lora(PARTS), *load, *saved])
    assert "is of another model" in error(other, [*lora(FUSED), "--load", str(other), *saved])
    assert "--lora-load" in error(model, [*lora(FUSED), "--load", str(tmp_path / "saved")])
    given = "give --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 --lora-r 4 --lora-alpha 6 to go on"
    assert given in error(model, ["--load", str(tmp_path / "saved")])
    assert "--lora-r 4" in error(model, [*lora(PARTS), *load, "--lora-load", peft, "--lora-r", "8"])
    assert "one A for all of its parts" in error(model, [*lora(FUSED), *load, "--lora-load", peft])
    assert "has shape" in error(model, [*lora(PARTS), *load, "--lora-load", of_other])
    assert "would be left out" in error(model, [*lora(PARTS[:3]), *load, "--lora-load", peft])
    export = [*lora(FUSED), "--save-lora-to-hf", "--save", str(tmp_path / "x")]
    assert "says hidden_size" in error(model, [*export, *load, "--hf-cfg-dir", str(other)])
    assert "to --hf-cfg-dir" in error(model, [*export, "--load", str(tmp_path / "saved"), "--lora-load", peft])
    assert f"--hf-cfg-dir {tmp_path} has no config.json" in error(
        model, [*export, *load, "--hf-cfg-dir", str(tmp_path)]
    )
    same = ["--hf-save-dir", str(tmp_path / "x")]
    assert "is the folder of --save" in error(model, [*export, *load, *same])
    assert "no adapters" in error(model, [*lora(FUSED), *load, "--lora-load", str(base_checkpoint(model, tmp_path))])


def base_checkpoint(model: Path, tmp_path: Path) -> Path:
    flags = ["--load-model-type", "hf", "--save-model-type", "mg", "--load-dir", str(model)]
    convert([*flags, "--save-dir", str(tmp_path / "no_adapter"), "--padded-vocab-size", "512"])
    return tmp_path / "no_adapter"
