"""Adapters alone: exported to PEFT's files and loaded there, taken from them into Megatron's splits, and moved."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import lora
from mindspeed_llm.tasks.checkpoint.adapter import in_form
from mindspeed_llm.tasks.checkpoint.layout import Rank, Topology
from mindspeed_llm.tasks.checkpoint.peft_files import open_peft
from mindspeed_llm.tasks.checkpoint.plan import rank_targets
from mindspeed_llm.tasks.checkpoint.prepare import prepare
from mindspeed_llm.tasks.checkpoint.slabs import assemble
from tests.tasks.checkpoint import lora_files, toys
from tests.tasks.checkpoint.lora_files import ALPHA, ONE, PP2, RANK, TP2, TP2_VPP, Pairs, Split
from tests.tasks.checkpoint.test_layout import EP, PP, TP, VPP
from tests.tasks.checkpoint.test_lora_merge import ATTENTION, LATENT, MLP, HfToy, expect_close, make

FUSED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
SINGLE = ("linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2")
LATENT_SINGLE = ("linear_q_down_proj", "linear_kv_down_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj")
LATENT_FUSED = ("linear_qkv", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 35).view(2, 16)).logits


def expect_peft(folder: Path, pairs: Pairs) -> None:
    """PEFT's names, and the very bits."""
    found = load_file(folder / "adapter_model.safetensors")
    assert len(found) == 2 * len(pairs)
    for module, (a, b) in pairs.items():
        assert torch.equal(found[f"base_model.model.{module}.lora_A.weight"], a), module
        assert torch.equal(found[f"base_model.model.{module}.lora_B.weight"], b), module


@pytest.mark.parametrize(
    ("toy", "leaves", "split", "shared"),
    [
        ("llama", (*ATTENTION, *MLP), TP2, True),
        ("qwen3", (*ATTENTION, *MLP), TP2_VPP, False),
        ("qwen3", ("q_proj", "k_proj", "v_proj"), PP2, True),
        ("qwen3-moe", (*ATTENTION, *MLP), replace(TP2, ep=2), True),
        ("qwen3-moe", (*ATTENTION, *MLP), Split(tp=2, ep=2, grouped=True), True),
        ("deepseek3", LATENT, TP2, True),
        ("deepseek2", LATENT, PP2, False),
    ],
)
def test_exported_adapter_in_peft(
    toy: str, leaves: Sequence[str], split: Split, shared: bool, hf_toy: HfToy, tmp_path: Path
) -> None:
    """The base with the exported adapter, in PEFT, computes what the merged model computes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = make(hf_toy, toy, leaves, shared=shared)
    adapter = lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, split, fused=shared)
    export = ["--save-lora-to-hf", "--hf-cfg-dir", str(made.hf), "--verify", "full"]
    toys.run(adapter, tmp_path / "peft", *export, of="mg", to="hf")
    expect_peft(tmp_path / "peft", made.pairs)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(leaves)
    assert (config["r"], config["lora_alpha"], config["bias"]) == (RANK, ALPHA, "none")
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(made.hf)
    assert sorted(path.name for path in (tmp_path / "peft").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "conversion_report.json",
    ]

    toys.run(made.hf, tmp_path / "base")
    toys.run(tmp_path / "base", tmp_path / "merged", "--lora-load", str(adapter), of="mg", to="hf")
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    before = AutoModelForCausalLM.from_pretrained(made.hf, dtype=torch.float32)
    assert (logits(before) - merged).abs().max() > 0.1
    with_adapter = logits(PeftModel.from_pretrained(before, tmp_path / "peft"))
    assert (with_adapter - merged).abs().max() <= 1e-5 * merged.abs().max()


@pytest.mark.parametrize(
    ("toy", "leaves", "targets", "flags"),
    [
        ("qwen3", (*ATTENTION, *MLP), SINGLE, [TP, "2", PP, "2", VPP, "1"]),
        ("llama-biases", ("q_proj", "down_proj"), ("linear_q", "linear_fc2"), [TP, "2"]),
        ("qwen3-moe", (*ATTENTION, *MLP), SINGLE, [TP, "2", EP, "2", PP, "2"]),
        ("deepseek3", LATENT, LATENT_SINGLE, [TP, "2", PP, "2"]),
    ],
)
def test_peft_to_megatron_and_back(
    toy: str, leaves: Sequence[str], targets: Sequence[str], flags: list[str], hf_toy: HfToy, tmp_path: Path
) -> None:
    """An adapter on each projection comes back bit for bit; in between it is what a training would have written."""
    made = make(hf_toy, toy, leaves, shared=False)
    source = lora_files.save_peft(tmp_path / "peft", made.pairs)
    form = ["--hf-cfg-dir", str(made.hf), "--lora-target-modules", *targets, "--verify", "full"]
    toys.run(source, tmp_path / "mg", *form, *flags)
    toys.run(tmp_path / "mg", tmp_path / "back", "--save-lora-to-hf", of="mg", to="hf")
    expect_peft(tmp_path / "back", made.pairs)
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(leaves) and config["base_model_name_or_path"] is None
    # Moved to one rank, and out of there again.
    toys.run(tmp_path / "mg", tmp_path / "moved", "--lora-target-modules", *targets, of="mg", to="mg")
    toys.run(tmp_path / "moved", tmp_path / "again", "--save-lora-to-hf", of="mg", to="hf")
    expect_peft(tmp_path / "again", made.pairs)


@pytest.mark.parametrize(
    ("toy", "leaves", "targets", "split", "flags", "shared"),
    [
        ("qwen3", (*ATTENTION, *MLP), SINGLE, TP2_VPP, [TP, "2", PP, "2", VPP, "1"], False),
        ("llama", (*ATTENTION, *MLP), FUSED, TP2, [TP, "2"], True),
        ("qwen3-moe", (*ATTENTION, *MLP), FUSED, replace(TP2, ep=2), [TP, "2", EP, "2"], True),
        (
            "qwen3-moe",
            (*ATTENTION, *MLP),
            FUSED,
            Split(tp=2, ep=2, grouped=True),
            [TP, "2", EP, "2", "--moe-grouped-gemm"],
            True,
        ),
        ("deepseek3", LATENT, LATENT_FUSED, TP2, [TP, "2"], True),
    ],
)
def test_keys_and_values_by_hand(
    toy: str,
    leaves: Sequence[str],
    targets: Sequence[str],
    split: Split,
    flags: list[str],
    shared: bool,
    hf_toy: HfToy,
    tmp_path: Path,
) -> None:
    """What is written for each rank is what slicing by hand gives: keys, shapes, values, and nothing else."""
    made = make(hf_toy, toy, leaves, shared=shared)
    source = lora_files.save_peft(tmp_path / "peft", made.pairs)
    toys.run(source, tmp_path / "mg", "--hf-cfg-dir", str(made.hf), "--lora-target-modules", *targets, *flags)
    found = toys.read_mg(tmp_path / "mg")
    expected = {}
    for rank, state in lora_files.rank_states(made.pairs, made.config, split, fused=shared).items():
        expected[f"iter_0000001/{rank}/model_optim_rng.pt"] = {
            key if chunk == "model" else f"{chunk}/{key}": value
            for chunk, tensors in state.items()
            for key, value in tensors.items()
        }
    assert found.keys() == expected.keys()
    for path, tensors in expected.items():
        assert found[path].keys() == tensors.keys()
        for key, value in tensors.items():
            assert found[path][key].shape == value.shape and torch.equal(found[path][key], value), key


FAMILIES = {
    # toy: last names of the modules, Megatron's layers
    "phi3": (("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), FUSED),
    "glm4": ((*ATTENTION, "gate_up_proj", "down_proj"), ("linear_q", "linear_k", "linear_v", *FUSED[1:])),
    "gemma3": (("q_proj", "k_proj", "v_proj", "up_proj"), ("linear_q", "linear_k", "linear_v", "linear_fc1_up")),
    "gpt-oss": (ATTENTION, ("linear_q", "linear_k", "linear_v", "linear_proj")),
    "mamba2": (("in_proj", "out_proj"), ("in_proj", "out_proj")),
    "longcat": (LATENT, LATENT_SINGLE),
    "bailing_mini": (("query_key_value", "dense"), ("linear_qkv", "linear_proj")),
    "qwen3-next": (
        (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"),
        ("q_proj", "k_proj", "v_proj", "linear_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    ),
}


@pytest.mark.parametrize("toy", FAMILIES)
def test_other_families_there_and_back(toy: str, hf_toy: HfToy, tmp_path: Path) -> None:
    """Packed projections, two attentions in a layer, layers of several kinds; merged as arithmetic says, too."""
    leaves, targets = FAMILIES[toy]
    made = make(hf_toy, toy, leaves, shared=False)
    source = lora_files.save_peft(tmp_path / "peft", made.pairs)
    flags = [PP, "2", *([] if toy == "qwen3-next" else [TP, "2"])]
    form = ["--hf-cfg-dir", str(made.hf), "--lora-target-modules", *targets]
    toys.run(source, tmp_path / "adapter", *form, *flags)
    toys.run(tmp_path / "adapter", tmp_path / "back", "--save-lora-to-hf", of="mg", to="hf")
    expect_peft(tmp_path / "back", made.pairs)
    mtp = ["--mtp-num-layers", "1"] if made.config.get("num_nextn_predict_layers") else []
    toys.run(made.hf, tmp_path / "mg", *mtp)
    toys.run(tmp_path / "mg", tmp_path / "merged", "--lora-load", str(tmp_path / "adapter"), of="mg", to="hf")
    expect_close(tmp_path / "merged", made.expected)


def test_adapters_on_mtp_layers_stay_in_megatron(hf_toy: HfToy, tmp_path: Path) -> None:
    """No class of transformers has those layers: in PEFT's files they are named as dropped."""
    made = make(hf_toy, "deepseek32", LATENT, shared=True)
    adapter = lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, ONE, mtp_num_layers=1)
    path = adapter / "iter_0000020" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    for key in [key for key in content["model"] if key.startswith("decoder.layers.0.")]:
        mtp = key.replace("decoder.layers.0.", "mtp.layers.0.transformer_layer.")
        content["model"][mtp] = content["model"][key] + 1
    torch.save(content, path)
    flags = ["--hf-cfg-dir", str(made.hf)]
    done = toys.run(adapter, tmp_path / "peft", "--save-lora-to-hf", *flags, of="mg", to="hf")
    expect_peft(tmp_path / "peft", made.pairs)
    dropped = done.report["source"]["dropped"]
    assert sorted(dropped) == [
        f"model.layers.4.self_attn.{name}.lora_{half}.weight" for name in sorted(LATENT) for half in "AB"
    ]
    # Between splits of Megatron it stays.
    moved = ["--lora-target-modules", *LATENT_FUSED, "--mtp-num-layers", "1", TP, "2"]
    toys.run(adapter, tmp_path / "moved", *flags, *moved, of="mg", to="mg")
    toys.run(tmp_path / "moved", tmp_path / "again", *flags, *moved[:-2], of="mg", to="mg")
    before, after = toys.read_mg(adapter), toys.read_mg(tmp_path / "again")
    [one], [other] = before.values(), after.values()
    assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def test_between_the_forms(hf_toy: HfToy, tmp_path: Path) -> None:
    """Fused adapters become ones per projection without loss; the other way only where parts share their A."""
    made = make(hf_toy, "qwen3", (*ATTENTION, *MLP), shared=True)
    adapter = lora_files.save_megatron(tmp_path / "fused", made.pairs, made.config, TP2)
    family = ["--model-type-hf", "qwen3", "--hf-cfg-dir", str(made.hf)]
    toys.run(adapter, tmp_path / "single", *family, "--lora-target-modules", *SINGLE, PP, "2", of="mg", to="mg")
    keys = {key for rank in toys.read_mg(tmp_path / "single").values() for key in rank}
    assert "decoder.layers.0.self_attention.linear_k.lora_A.default.weight" in keys
    toys.run(tmp_path / "single", tmp_path / "peft", "--save-lora-to-hf", of="mg", to="hf")
    expect_peft(tmp_path / "peft", made.pairs)
    toys.run(tmp_path / "single", tmp_path / "again", "--lora-target-modules", *FUSED, TP, "2", of="mg", to="mg")
    before, after = toys.read_mg(tmp_path / "fused"), toys.read_mg(tmp_path / "again")
    for (path, tensors), other in zip(before.items(), after.values(), strict=True):
        assert tensors.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in tensors.items()), path

    apart = make(hf_toy, "qwen3", (*ATTENTION, *MLP), shared=False)
    source = lora_files.save_peft(tmp_path / "apart", apart.pairs)
    with pytest.raises(UserError, match=r"(k|up)_proj\.lora_A\.weight and .* differ.*per projection: linear_fc1_gate"):
        toys.run(source, tmp_path / "no", "--hf-cfg-dir", str(made.hf), "--lora-target-modules", *FUSED)


def test_a_running_job_loads_its_share(hf_toy: HfToy, tmp_path: Path) -> None:
    """PEFT's files, tensor by tensor, as one rank of a training has them."""
    made = make(hf_toy, "qwen3", (*ATTENTION, *MLP), shared=True)
    folder = lora_files.save_peft(tmp_path / "peft", made.pairs)
    loaded = prepare(toys.request(made.hf, tmp_path / "no")).loaded
    adapter = open_peft(folder, loaded.family, loaded.settings)
    model = adapter.model(Topology(tp=2, pp=2, layers_per_virtual_stage=1), in_form(adapter, FUSED))
    states = lora_files.rank_states(made.pairs, made.config, TP2_VPP, fused=True)
    found = {
        target.key: assemble(target, tuple((0, size) for size in target.view), adapter.source).reshape(target.shape)
        for _, target in rank_targets(model, Rank(tp=1, pp=1, ep=0), adapter.source)
    }
    expected = {
        f"{chunk}/{key}": value for chunk, tensors in states["mp_rank_01_001"].items() for key, value in tensors.items()
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_targets_are_named_apart_where_others_have_the_same_name(hf_toy: HfToy, tmp_path: Path) -> None:
    """An adapter on shared experts only: PEFT must not put one on other modules of that name."""
    made = make(hf_toy, "deepseek3", MLP, shared=True)
    pairs = {name: pair for name, pair in made.pairs.items() if ".shared_experts." in name}
    lora_files.save_megatron(tmp_path / "adapter", pairs, made.config, TP2)
    toys.run(
        tmp_path / "adapter",
        tmp_path / "peft",
        "--save-lora-to-hf",
        "--hf-cfg-dir",
        str(made.hf),
        of="mg",
        to="hf",
    )
    expect_peft(tmp_path / "peft", pairs)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["target_modules"] == [f"mlp.shared_experts.{name}" for name in sorted(MLP)]


def test_every_family_has_adapters_in_its_table() -> None:
    """Each linear layer in both forms: names are unique under their conditions, B and A are written as pairs."""
    from mindspeed_llm.tasks.checkpoint.families import FAMILIES

    for family in FAMILIES:
        found = lora.places(family)
        assert found, family.ids
        keys = [(place.b.mg, place.b.when) for place in found]
        assert len(set(keys)) == len(keys), family.ids
        targets = {place.target for place in found}
        assert targets & {"linear_qkv", "in_proj", "q_proj"}, family.ids
        for place in found:
            assert not any(word in place.name for word in ("norm", "router", "embedding")), place.name


def test_mutant_export_shares_no_a(hf_toy: HfToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused adapter whose projections do not get the A that they share cannot be written."""
    original: Callable = lora._of_entry
    monkeypatch.setattr(lora, "_of_entry", lambda item: (replace(place, copies=()) for place in original(item)))
    with pytest.raises((AssertionError, UserError)):
        test_exported_adapter_in_peft("llama", (*ATTENTION, *MLP), ONE, True, hf_toy, tmp_path)
