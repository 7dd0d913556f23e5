"""Merging LoRA adapters: against PEFT's own merge and arithmetic, whatever the splits; faults that must show."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import adapter, lora, merge
from mindspeed_llm.tasks.checkpoint.prepare import prepare
from mindspeed_llm.tasks.checkpoint.rules import ROWS, WHOLE
from mindspeed_llm.tasks.checkpoint.slabs import assemble, rounded, slabs
from tests.tasks.checkpoint import lora_files, toys
from tests.tasks.checkpoint.lora_files import ALPHA, EP2, ONE, PP2, RANK, TP2, TP2_VPP, Pairs, Split
from tests.tasks.checkpoint.test_convert import expect_same_mg
from tests.tasks.checkpoint.test_layout import EP, PP, TP, VPP

HfToy = Callable[[str], Path]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
LATENT_LITE = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@dataclass(frozen=True)
class Made:
    """A toy with an adapter."""

    hf: Path
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    pairs: Pairs

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        return lora_files.merged(self.weights, self.pairs)


def make(hf_toy: HfToy, name: str, leaves: Sequence[str], *, shared: bool, mtp: bool = False, rank: int = RANK) -> Made:
    """A random adapter on all layers of a toy; on its MTP layers, too, if told to."""
    hf = hf_toy(name)
    config = json.loads((hf / "config.json").read_text())
    weights = toys.read_hf(hf)
    count = config.get("num_hidden_layers") or config["num_layers"]
    own = {key: value for key, value in weights.items() if mtp or not key.startswith(f"model.layers.{count}.")}
    pairs = lora_files.random_pairs(lora_files.shapes_of(own, leaves), shared=shared, rank=rank)
    return Made(hf=hf, config=config, weights=weights, pairs=pairs)


def expect_close(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """All tensors, within 1e-6 of the largest value of each."""
    found = toys.read_hf(folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        error = (found[name].double() - value.double()).abs().max().item()
        assert error <= 1e-6 * value.abs().max().item(), f"{name}: {error}"


MTP1 = ["--mtp-num-layers", "1"]
CASES = {
    # (toy, layers, split of the adapter, flags of the base)
    "llama": ("llama", (*ATTENTION, *MLP), ONE, [TP, "2"]),
    "llama, adapter tp 2": ("llama", (*ATTENTION, *MLP), TP2, [PP, "2"]),
    "qwen3, adapter pp 2": ("qwen3", (*ATTENTION, *MLP), PP2, [TP, "2"]),
    "qwen3, adapter vpp": ("qwen3", (*ATTENTION, *MLP), TP2_VPP, [PP, "2", VPP, "1"]),
    "qwen3-moe, sequential experts": ("qwen3-moe", (*ATTENTION, *MLP), replace(TP2, ep=2), [EP, "2"]),
    "deepseek2, latent attention": ("deepseek2", (*LATENT, *MLP), TP2, [PP, "2"]),
    "deepseek2-lite, no low rank for queries": ("deepseek2-lite", (*LATENT_LITE, *MLP), PP2, [TP, "2"]),
    "deepseek3, ep 2": ("deepseek3", (*LATENT, *MLP), EP2, [TP, "2"]),
    "deepseek32, not on its MTP layer": ("deepseek32", LATENT, TP2, [PP, "2", "--mla-mm-split", *MTP1]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shared", [True, False], ids=["fused", "per projection"])
@pytest.mark.parametrize("name", CASES)
def test_merged_is_what_arithmetic_says(name: str, shared: bool, hf_toy: HfToy, tmp_path: Path) -> None:
    """Adapters laid out by hand, of one split, into a base of another, in all directions."""
    toy, leaves, split, flags = CASES[name]
    made = make(hf_toy, toy, leaves, shared=shared)
    base, adapter_folder = tmp_path / "mg", tmp_path / "adapter"
    lora_files.save_megatron(adapter_folder, made.pairs, made.config, split, fused=shared)
    toys.run(made.hf, base, *flags)
    load = ["--lora-load", str(adapter_folder), "--verify", "full"]
    toys.run(base, tmp_path / "merged", *load, of="mg", to="hf")
    expect_close(tmp_path / "merged", made.expected)
    # hf -> mg and mg -> mg give what the merged model gives.
    toys.run(tmp_path / "merged", tmp_path / "again", *flags)
    toys.run(made.hf, tmp_path / "from_hf", *load, *flags)
    expect_same_mg(tmp_path / "from_hf", tmp_path / "again")
    toys.run(base, tmp_path / "from_mg", *load, *flags, of="mg", to="mg")
    expect_same_mg(tmp_path / "from_mg", tmp_path / "again")


@pytest.mark.parametrize(
    ("toy", "leaves"),
    [
        ("llama", (*ATTENTION, *MLP)),
        ("llama-biases", (*ATTENTION, *MLP)),
        ("qwen3", ("q_proj", "v_proj")),
        ("qwen3", MLP),
        ("deepseek2", LATENT),
        ("deepseek3", LATENT),
    ],
)
def test_merged_is_what_peft_merges(toy: str, leaves: Sequence[str], hf_toy: HfToy, tmp_path: Path) -> None:
    """PEFT's adapter per projection, saved by PEFT, in PEFT's files."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    hf = hf_toy(toy)
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(leaves)))
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.3)
    wrapped.save_pretrained(tmp_path / "peft")
    wrapped.merge_and_unload().save_pretrained(tmp_path / "by_peft")
    by_peft = toys.read_hf(tmp_path / "by_peft")

    toys.run(hf, tmp_path / "mg", TP, "2")
    toys.run(tmp_path / "mg", tmp_path / "merged", "--lora-load", str(tmp_path / "peft"), of="mg", to="hf")
    merged = toys.read_hf(tmp_path / "merged")
    before = toys.read_hf(hf)
    changed = {name for name in by_peft if not torch.equal(by_peft[name], before[name])}
    assert {name.removesuffix(".weight").rpartition(".")[2] for name in changed} == set(leaves)
    for name, value in by_peft.items():
        error = (merged[name] - value).abs().max().item()
        assert error <= 1e-6 * value.abs().max().item(), f"{name}: {error}"
    # From Hugging Face, too.
    toys.run(hf, tmp_path / "direct", "--lora-load", str(tmp_path / "peft"), TP, "2")
    toys.run(tmp_path / "merged", tmp_path / "again", TP, "2")
    expect_same_mg(tmp_path / "direct", tmp_path / "again")


def test_fused_adapters_are_what_peft_merges_with_one_a(hf_toy: HfToy, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made = make(hf_toy, "qwen3", (*ATTENTION, *MLP), shared=True)
    lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, TP2_VPP)
    lora_files.save_peft(tmp_path / "peft", made.pairs)
    model = AutoModelForCausalLM.from_pretrained(made.hf, dtype=torch.float32)
    PeftModel.from_pretrained(model, tmp_path / "peft").merge_and_unload().save_pretrained(tmp_path / "by_peft")
    toys.run(made.hf, tmp_path / "mg", PP, "2")
    toys.run(tmp_path / "mg", tmp_path / "merged", "--lora-load", str(tmp_path / "adapter"), of="mg", to="hf")
    expect_close(tmp_path / "merged", toys.read_hf(tmp_path / "by_peft"))


@pytest.mark.parametrize("toy", ["qwen3-moe", "deepseek3"])
def test_grouped_experts(toy: str, hf_toy: HfToy, tmp_path: Path) -> None:
    """Adapters of experts in one tensor for all experts of a rank."""
    latent = toy == "deepseek3"
    made = make(hf_toy, toy, (*(LATENT if latent else ATTENTION), *MLP), shared=True)
    split = Split(tp=2, pp=2, ep=2, stages=PP2.stages, grouped=True)
    lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, split)
    toys.run(made.hf, tmp_path / "mg", TP, "2", "--moe-grouped-gemm")
    toys.run(tmp_path / "mg", tmp_path / "merged", "--lora-load", str(tmp_path / "adapter"), of="mg", to="hf")
    expect_close(tmp_path / "merged", made.expected)


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("toy", ["llama-biases", "qwen3"])
def test_unified_checkpoint(toy: str, implementation: str, hf_toy: HfToy, tmp_path: Path) -> None:
    """Base and adapter in one checkpoint, the base's tensors (biases and fused norms, too) behind `base_layer`."""
    made = make(hf_toy, toy, (*ATTENTION, *MLP), shared=True)
    toys.run(made.hf, tmp_path / "mg", TP, "2", PP, "2", VPP, "1", "--transformer-impl", implementation)
    lora_files.save_unified(tmp_path / "whole", tmp_path / "mg", made.pairs, made.config, TP2_VPP)
    flags = ["--lora-r", str(RANK), "--lora-alpha", str(ALPHA)]
    toys.run(tmp_path / "whole", tmp_path / "merged", *flags, of="mg", to="hf")
    expect_close(tmp_path / "merged", made.expected)
    toys.run(tmp_path / "merged", tmp_path / "expected", TP, "2")
    toys.run(tmp_path / "whole", tmp_path / "moved", *flags, TP, "2", of="mg", to="mg")
    expect_same_mg(tmp_path / "expected", tmp_path / "moved")


def test_lower_case_keys_and_alpha_by_flag(hf_toy: HfToy, tmp_path: Path) -> None:
    made = make(hf_toy, "llama", (*ATTENTION, *MLP), shared=True)
    states = lora_files.rank_states(made.pairs, made.config, ONE, fused=True)
    for state in states.values():
        state["model"] = {
            key.replace("lora_A", "lora_a").replace("lora_B", "lora_b"): value for key, value in state["model"].items()
        }
    lora_files.write(tmp_path / "adapter", states, {"num_layers": 4})
    flags = ["--lora-load", str(tmp_path / "adapter"), "--lora-alpha", "10", "--lora-r", "4"]
    flags += ["--lora-target-modules", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    toys.run(made.hf, tmp_path / "mg")
    toys.run(tmp_path / "mg", tmp_path / "merged", *flags, of="mg", to="hf")
    expect_close(tmp_path / "merged", lora_files.merged(made.weights, made.pairs, scale=2.5))


def test_adapters_of_mtp_layers(hf_toy: HfToy, tmp_path: Path) -> None:
    made = make(hf_toy, "deepseek32", LATENT, shared=True, mtp=True)
    states = lora_files.rank_states(made.pairs, made.config, ONE, fused=True)
    model = states["mp_rank_00"]["model"]
    as_layer = {
        name.replace("model.layers.4.", "model.layers.0."): pair
        for name, pair in made.pairs.items()
        if name.startswith("model.layers.4.")
    }
    for key, value in lora_files.rank_states(as_layer, made.config, ONE, fused=True)["mp_rank_00"]["model"].items():
        model[key.replace("decoder.layers.0.", "mtp.layers.0.transformer_layer.")] = value
    lora_files.write(tmp_path / "adapter", states, {"num_layers": 4, "mtp_num_layers": 1, "lora_alpha": ALPHA})
    assert any(name.startswith("model.layers.4.") for name in made.pairs)
    toys.run(made.hf, tmp_path / "mg", *MTP1)
    toys.run(tmp_path / "mg", tmp_path / "merged", "--lora-load", str(tmp_path / "adapter"), of="mg", to="hf")
    expect_close(tmp_path / "merged", made.expected)
    # Without its MTP layers the base has no place for it.
    toys.run(made.hf, tmp_path / "short")
    with pytest.raises(UserError, match=r"has an adapter for model\.layers\.4\.self_attn.*, which the model has not"):
        toys.run(tmp_path / "short", tmp_path / "no", "--lora-load", str(tmp_path / "adapter"), of="mg", to="hf")


def test_layers_that_are_sections_of_one_module(hf_toy: HfToy, tmp_path: Path) -> None:
    """Query, key, value and gate, up in one matrix each: a fused adapter has one B for it, others have one per part."""
    made = make(hf_toy, "phi3", ("qkv_proj", "gate_up_proj"), shared=False)
    config, weights = made.config, made.weights
    heads, groups, hidden = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    width, ffn = hidden // heads, config["intermediate_size"]
    expected, states = dict(weights), {}
    chance = torch.Generator().manual_seed(2)
    for layer in range(config["num_hidden_layers"]):
        sizes = {
            "self_attention.linear_q": ("self_attn.qkv_proj", 0, heads * width),
            "self_attention.linear_k": ("self_attn.qkv_proj", heads * width, groups * width),
            "self_attention.linear_v": ("self_attn.qkv_proj", (heads + groups) * width, groups * width),
            "mlp.linear_fc1_gate": ("mlp.gate_up_proj", 0, ffn),
            "mlp.linear_fc1_up": ("mlp.gate_up_proj", ffn, ffn),
        }
        for key, (module, start, rows) in sizes.items():
            a, b = torch.randn(RANK, hidden, generator=chance), torch.randn(rows, RANK, generator=chance)
            name = f"model.layers.{layer}.{module}.weight"
            part = torch.zeros(expected[name].shape, dtype=torch.float64)
            part[start : start + rows] = ALPHA / RANK * (b.double() @ a.double())
            expected[name] = (expected[name].double() + part).float()
            for rank in range(2):
                tensors = states.setdefault(f"mp_rank_{rank:02d}", {"model": {}})["model"]
                tensors[f"decoder.layers.{layer}.{key}.lora_A.default.weight"] = a.clone()
                tensors[f"decoder.layers.{layer}.{key}.lora_B.default.weight"] = b.chunk(2)[rank].clone()
    arguments = {"num_layers": 4, "tensor_model_parallel_size": 2, "lora_alpha": ALPHA, "lora_r": RANK}
    lora_files.write(tmp_path / "adapter", states, arguments)
    toys.run(made.hf, tmp_path / "mg", PP, "2")
    toys.run(tmp_path / "mg", tmp_path / "merged", "--lora-load", str(tmp_path / "adapter"), of="mg", to="hf")
    expect_close(tmp_path / "merged", expected)
    with pytest.raises(UserError, match="linear_q, which is a part of one Hugging Face module; PEFT has no place"):
        toys.run(
            tmp_path / "mg",
            tmp_path / "no",
            "--lora-load",
            str(tmp_path / "adapter"),
            "--save-lora-to-hf",
            of="mg",
            to="hf",
        )


def test_four_matrices_of_latent_attention(hf_toy: HfToy, tmp_path: Path) -> None:
    """`--mla-mm-split`: the up projections in two parts of each head's rows, each with its adapter."""
    made = make(hf_toy, "deepseek2", ("q_b_proj",), shared=False)
    config = made.config
    heads, nope, rope, value = (
        config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    parts = {
        "linear_qk_nope": ("q_b_proj", nope + rope, 0, nope),
        "linear_qk_rope": ("q_b_proj", nope + rope, nope, rope),
        "linear_kv_nope": ("kv_b_proj", nope + value, 0, nope),
        "linear_v": ("kv_b_proj", nope + value, nope, value),
    }
    expected, states = dict(made.weights), {}
    chance = torch.Generator().manual_seed(3)
    for layer in range(config["num_hidden_layers"]):
        for key, (module, per_head, start, rows) in parts.items():
            name = f"model.layers.{layer}.self_attn.{module}.weight"
            columns = expected[name].shape[1]
            a, b = torch.randn(RANK, columns, generator=chance), torch.randn(heads, rows, RANK, generator=chance)
            grown = expected[name].double().view(heads, per_head, columns).clone()
            grown[:, start : start + rows] += ALPHA / RANK * (b.double() @ a.double())
            expected[name] = grown.view(-1, columns).float()
            for rank in range(2):
                tensors = states.setdefault(f"mp_rank_{rank:02d}", {"model": {}})["model"]
                at = f"decoder.layers.{layer}.self_attention.{key}"
                tensors[f"{at}.lora_A.default.weight"] = a.clone()
                tensors[f"{at}.lora_B.default.weight"] = b.chunk(2)[rank].reshape(-1, RANK).clone()
    arguments = {"num_layers": 4, "tensor_model_parallel_size": 2, "lora_alpha": ALPHA, "lora_r": RANK}
    lora_files.write(tmp_path / "adapter", states, arguments)
    for number, flags in enumerate(([], ["--mla-mm-split"])):
        toys.run(made.hf, tmp_path / f"mg{number}", *flags)
        toys.run(
            tmp_path / f"mg{number}",
            tmp_path / f"merged{number}",
            "--lora-load",
            str(tmp_path / "adapter"),
            of="mg",
            to="hf",
        )
        expect_close(tmp_path / f"merged{number}", expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit(dtype: torch.dtype, hf_toy: HfToy, tmp_path: Path) -> None:
    """The base's dtype stays, and no other number of that dtype is nearer."""
    made = make(hf_toy, "qwen3", ("q_proj", "k_proj", "v_proj", "down_proj"), shared=True)
    weights = {name: value.to(dtype) for name, value in made.weights.items()}
    hf = toys.save_hf(tmp_path / "hf", made.config, weights)
    pairs = {name: (a.bfloat16(), b) for name, (a, b) in made.pairs.items()}
    lora_files.save_megatron(tmp_path / "adapter", pairs, made.config, TP2)
    toys.run(hf, tmp_path / "mg", TP, "2")
    toys.run(tmp_path / "mg", tmp_path / "merged", "--lora-load", str(tmp_path / "adapter"), of="mg", to="hf")
    found = toys.read_hf(tmp_path / "merged")
    for name, value in lora_files.merged({n: w.double() for n, w in weights.items()}, pairs).items():
        assert found[name].dtype == dtype
        _expect_nearest(found[name], value)
    # In fp32 nothing of the sum is lost to the base's dtype.
    toys.run(
        tmp_path / "mg",
        tmp_path / "wide",
        "--lora-load",
        str(tmp_path / "adapter"),
        "--params-dtype",
        "fp32",
        of="mg",
        to="hf",
    )
    found = toys.read_hf(tmp_path / "wide")
    exact = lora_files.merged({n: w.double() for n, w in weights.items()}, pairs)
    for name, value in exact.items():
        assert found[name].dtype == torch.float32
        assert (found[name].double() - value).abs().max() <= 2**-23 * value.abs().max(), name


def _expect_nearest(found: torch.Tensor, exact: torch.Tensor) -> None:
    error = (found.double() - exact).abs()
    for step in (-1, 1):
        neighbour = (found.view(torch.int16) + step).view(found.dtype).double()
        assert (error <= (neighbour - exact).abs()).all()


def test_values_are_rounded_once() -> None:
    """Just above the middle between two numbers of 16 bit, by less than float32 can tell."""
    for dtype, digits in ((torch.bfloat16, 8), (torch.float16, 11)):
        tie, up = 1 + 2.0**-digits, 1 + 2.0 ** (1 - digits)
        rows = [(tie + 2.0**-40, up), (tie, 1), (tie - 2.0**-40, 1), (-tie - 2.0**-40, -up), (2.0**-160, 0)]
        rows.append((-1e300, float("-inf")))
        exact, expected = torch.tensor(rows, dtype=torch.float64).T
        assert torch.equal(rounded(exact, dtype), expected.to(dtype))
        assert rounded(exact * float("nan"), dtype).isnan().all()
        assert exact[0].to(dtype) == 1, "torch rounds once by itself now"


def test_values_do_not_depend_on_the_part_that_is_read(hf_toy: HfToy, tmp_path: Path) -> None:
    """Bit for bit: verification reads other parts than were written."""
    made = make(hf_toy, "llama", (*ATTENTION, *MLP), shared=True, rank=37)
    lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, TP2)
    toys.run(made.hf, tmp_path / "mg", TP, "2")
    flags = ["--lora-load", str(tmp_path / "adapter")]
    found = prepare(toys.request(tmp_path / "mg", tmp_path / "no", *flags, of="mg", to="hf"))
    source = found.loaded.source
    for target in found.plan.files[0].targets:
        whole = assemble(target, tuple((0, size) for size in target.view), source).reshape(-1)
        for limit in (52, 700, 3000):
            parts = torch.cat([assemble(target, box, source).reshape(-1) for box in slabs(target, limit)])
            assert torch.equal(parts, whole), target.key


# Faults: each must fail one of the tests above


def _forgotten_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter.Adapter, "scale", 1.0)


def _a_of_keys_for_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    original = merge.MergedSource._half

    def half(self, tensor, box):
        if tensor.name.endswith("q_proj.lora_A.weight"):
            tensor = self._adapter.tensors[tensor.name.replace("q_proj", "k_proj")]
        return original(self, tensor, box)

    monkeypatch.setattr(merge.MergedSource, "_half", half)


def _changed_places(change: Callable[[lora.Place], lora.Place]) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = lora._of_entry
        monkeypatch.setattr(lora, "_of_entry", lambda item: (change(place) for place in original(item)))

    return patch


def _rows_in_another_order(place: lora.Place) -> lora.Place:
    fused = place.name.endswith("linear_qkv")
    return replace(place, b=replace(place.b, rule=ROWS)) if fused else place


def _gate_and_up_swapped(place: lora.Place) -> lora.Place:
    fused = place.name.endswith("linear_fc1")
    return replace(place, b=replace(place.b, sources=place.b.sources[::-1])) if fused else place


def _a_is_not_cut(place: lora.Place) -> lora.Place:
    return replace(place, a=replace(place.a, rule=WHOLE))


def _b_is_not_cut(place: lora.Place) -> lora.Place:
    return replace(place, b=replace(place.b, rule=WHOLE)) if place.name.endswith("_q") else place


MUTANTS = {
    # name: (fault, case, whether the adapter is fused)
    "alpha / r is forgotten": (_forgotten_scale, "llama", True),
    "the A of keys is used for queries": (_a_of_keys_for_queries, "llama", False),
    # With one KV group on each rank, the two orders are the same.
    "rows of B stand in another order": (_changed_places(_rows_in_another_order), "llama", True),
    "gate and up change places": (_changed_places(_gate_and_up_swapped), "llama, adapter tp 2", True),
    "A is not cut where columns are": (_changed_places(_a_is_not_cut), "llama, adapter tp 2", True),
    "B is not cut where rows are": (_changed_places(_b_is_not_cut), "llama, adapter tp 2", False),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_show(name: str, hf_toy: HfToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, case, fused = MUTANTS[name]
    fault(monkeypatch)
    with pytest.raises((AssertionError, UserError)):
        test_merged_is_what_arithmetic_says(case, fused, hf_toy, tmp_path)
