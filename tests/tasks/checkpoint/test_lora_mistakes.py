"""Adapters that cannot be converted, flags that contradict them, and what is said of those that can."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import main as command
from mindspeed_llm.tasks.checkpoint.command_line import parse
from mindspeed_llm.tasks.checkpoint.report import table
from tests.tasks.checkpoint import lora_files, toys
from tests.tasks.checkpoint.lora_files import ALPHA, ONE, RANK, TP2
from tests.tasks.checkpoint.lora_merging import FUSED, merge
from tests.tasks.checkpoint.test_layout import TP
from tests.tasks.checkpoint.test_lora_merge import ATTENTION, MLP, HfToy, Made, expect_close, make

States = dict[str, dict[str, dict[str, torch.Tensor]]]
AT = "decoder.layers.0.self_attention.linear_qkv"


# Flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--save-lora-to-hf"], "--save-lora-to-hf writes PEFT's files; add --save-model-type hf"),
        (["--lora-r", "0"], "expected a whole number of at least 1"),
        (["--lora-laod", "x"], "did you mean --lora-load"),
        (["--lora-target-modules"], "expected at least one argument"),
    ],
)
def test_flags(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(["--load-dir", "a", "--save-dir", "b", "--load-model-type", "mg", *flags])


def test_flags_are_upstreams() -> None:
    flags = "--lora-load d --lora-r 8 --lora-alpha 16 --lora-target-modules linear_qkv linear_proj --save-lora-to-hf"
    request = parse(
        ["--load-dir", "a", "--save-dir", "b", "--load-model-type", "mg", "--save-model-type", "hf", *flags.split()]
    )
    assert (request.lora_load, request.lora_r, request.lora_alpha) == (Path("d"), 8, 16)
    assert request.lora_target_modules == ("linear_qkv", "linear_proj") and request.save_lora_to_hf
    assert not parse(["--load-dir", "a", "--save-dir", "b"]).wants_lora


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-r", "8"], "--lora-r 8 contradicts .*adapter.*, whose is 4"),
        (["--lora-alpha", "16"], "--lora-alpha 16 contradicts the arguments in .*, which say 6"),
        (
            ["--lora-target-modules", "linear_qkv", "linear_proj"],
            "--lora-target-modules linear_proj linear_qkv contradicts .*, which has adapters on "
            "linear_fc1 linear_fc2 linear_proj linear_qkv",
        ),
    ],
)
def test_flags_contradict_a_checkpoint(flags: list[str], message: str, made: Made, base: Path, tmp_path: Path) -> None:
    adapter = lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, TP2)
    with pytest.raises(UserError, match=message):
        merge(base, adapter, tmp_path, *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-r", "8"], "--lora-r 8 contradicts .*peft.*, whose is 4"),
        (["--lora-alpha", "16"], "--lora-alpha 16 contradicts .*peft.*, whose is 6"),
        (["--lora-target-modules", "linear_qkv"], "--lora-target-modules linear_qkv contradicts .*peft"),
    ],
)
def test_flags_contradict_peft(flags: list[str], message: str, made: Made, base: Path, tmp_path: Path) -> None:
    adapter = lora_files.save_peft(tmp_path / "peft", made.pairs)
    with pytest.raises(UserError, match=message):
        merge(base, adapter, tmp_path, *flags)
    # Those that agree, by either names, are welcome.
    merge(
        base,
        adapter,
        tmp_path,
        "--lora-r",
        "4",
        "--lora-alpha",
        "6",
        "--lora-target-modules",
        *FUSED,
    )
    expect_close(tmp_path / "merged", made.expected)


def test_alpha_is_said_by_nobody(made: Made, base: Path, tmp_path: Path) -> None:
    adapter = lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, alpha=None)
    with pytest.raises(UserError, match="does not say alpha in its arguments; give --lora-alpha"):
        merge(base, adapter, tmp_path, "--lora-r", "4")


def test_adapters_are_not_ignored(made: Made, base: Path, tmp_path: Path) -> None:
    """An input with an adapter, and no flag about it: the error says what to give. And flags without an adapter."""
    adapter = lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config)
    peft = lora_files.save_peft(tmp_path / "peft", made.pairs)
    toys.run(made.hf, tmp_path / "one")
    whole = lora_files.save_unified(tmp_path / "whole", tmp_path / "one", made.pairs, made.config)
    for folder, of, to in ((adapter, "mg", "hf"), (adapter, "mg", "mg"), (whole, "mg", "hf"), (peft, "hf", "mg")):
        with pytest.raises(UserError, match=r"holds a LoRA adapter\. To merge it, give --lora-r .*--save-lora-to-hf"):
            toys.run(folder, tmp_path / "out", of=of, to=to)
    # An adapter alone is never taken for a model.
    for folder, of, to in ((adapter, "mg", "hf"), (adapter, "mg", "mg"), (peft, "hf", "mg")):
        with pytest.raises(UserError, match=r"holds a LoRA adapter and no model\. To merge it, give"):
            toys.run(folder, tmp_path / "out", "--lora-r", "4", of=of, to=to)
    for folder, of, to in ((base, "mg", "hf"), (base, "mg", "mg"), (made.hf, "hf", "mg")):
        with pytest.raises(UserError, match="holds no adapter; give the folder of one in --lora-load, or leave"):
            toys.run(folder, tmp_path / "out", "--lora-r", "4", of=of, to=to)
    with pytest.raises(UserError, match="holds no adapter"):
        toys.run(base, tmp_path / "out", "--save-lora-to-hf", of="mg", to="hf")
    with pytest.raises(UserError, match="has no lora_A and lora_B among its keys"):
        merge(base, tmp_path / "one", tmp_path)
    with pytest.raises(UserError, match="holds an adapter, too; leave --lora-load out"):
        merge(whole, adapter, tmp_path)
    with pytest.raises(UserError, match=r"--lora-load .* is --load-dir; leave it out"):
        merge(base, base, tmp_path)
    with pytest.raises(UserError, match="expected a folder with PEFT's files, or with a Megatron checkpoint"):
        merge(base, tmp_path / "nowhere", tmp_path)
    with pytest.raises(UserError, match=r"--save-lora-to-hf: .*peft holds PEFT's files already"):
        merge(base, peft, tmp_path, "--save-lora-to-hf")
    with pytest.raises(UserError, match=r"holds an adapter alone; give the folder of the model .* in --hf-cfg-dir"):
        toys.run(peft, tmp_path / "out", "--lora-target-modules", "linear_proj")
    assert not (tmp_path / "out").exists()


def test_where_the_output_goes(made: Made, base: Path, tmp_path: Path) -> None:
    adapter = lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config)
    for folder, flags, message in (
        (adapter, [], "is --lora-load; choose another folder"),
        (tmp_path, ["--overwrite"], "--lora-load .* is in --save-dir"),
    ):
        with pytest.raises(UserError, match=message):
            toys.run(made.hf, folder, "--lora-load", str(adapter), *flags)


# Checkpoints


def _without(key: str) -> Callable[[States], None]:
    def change(states: States) -> None:
        for state in states.values():
            del state["model"][key]

    return change


def _with(key: str, value: torch.Tensor) -> Callable[[States], None]:
    def change(states: States) -> None:
        for state in states.values():
            state["model"][key] = value

    return change


def _renamed(old: str, new: str) -> Callable[[States], None]:
    def change(states: States) -> None:
        for rank, state in states.items():
            states[rank]["model"] = {key.replace(old, new): value for key, value in state["model"].items()}

    return change


def _apart(states: States) -> None:
    states["mp_rank_01"]["model"][f"{AT}.lora_A.default.weight"][0, 0] += 0.1


def test_ranks_may_differ_by_rounding(made: Made, base: Path, tmp_path: Path) -> None:
    states = lora_files.rank_states(made.pairs, made.config, TP2, fused=True)
    states["mp_rank_01"]["model"][f"{AT}.lora_A.default.weight"] *= 1 + 1e-6
    arguments = {"num_layers": 4, "tensor_model_parallel_size": 2, "lora_r": RANK, "lora_alpha": ALPHA}
    merge(base, lora_files.write(tmp_path / "adapter", states, arguments), tmp_path)
    expect_close(tmp_path / "merged", made.expected)


def _both(states: States) -> None:
    _renamed(f"{AT}.lora_A", f"{AT}.lora_A")(states)
    for state in states.values():
        state["model"][f"{AT}.lora_a.default.weight"] = state["model"][f"{AT}.lora_A.default.weight"]


DAMAGED: dict[str, tuple[Callable[[States], None], str]] = {
    "no B": (
        _without(f"{AT}.lora_B.default.weight"),
        rf"mp_rank_00.*{AT}\.lora_A\.default\.weight has no {AT}\.lora_B\.default\.weight beside it",
    ),
    "no A": (
        _without(f"{AT}.lora_A.default.weight"),
        rf"{AT}\.lora_B\.default\.weight has no {AT}\.lora_A\.default\.weight beside it",
    ),
    "a layer has none": (
        lambda states: (
            _without(f"{AT}.lora_A.default.weight")(states),
            _without(f"{AT}.lora_B.default.weight")(states),
        ),
        rf"has no {AT}\.lora_.\.default\.weight, which",
    ),
    "two ranks": (
        lambda states: (
            _with(f"{AT}.lora_A.default.weight", torch.zeros(8, 48))(states),
            _with(f"{AT}.lora_B.default.weight", torch.zeros(40, 8))(states),
        ),
        "has rank 8, but .* has rank 4; expected one rank for all|has rank 4, but .* has rank 8",
    ),
    "another shape": (
        _with(f"{AT}.lora_A.default.weight", torch.zeros(4, 44)),
        r"has shape \[4, 44\], expected \[4, 48\]",
    ),
    "on a norm": (
        _with("decoder.layers.0.input_layernorm.lora_A.default.weight", torch.zeros(4, 48)),
        "input_layernorm.lora_A.default.weight has no .*lora_B",
    ),
    "on a router": (
        lambda states: [
            _with(f"decoder.layers.0.mlp.router.lora_{half}.default.weight", torch.zeros(4, 4))(states) for half in "AB"
        ],
        "mlp.router.lora_A.default.weight is no adapter that a llama2 model can have; it can have some on linear_fc1",
    ),
    "on an embedding": (
        _with("embedding.word_embeddings.lora_embedding_A.default", torch.zeros(4, 509)),
        "is an adapter on an embedding, which has no table here",
    ),
    "dora": (
        _with(f"{AT}.lora_magnitude_vector.default.weight", torch.zeros(160)),
        "is of DoRA, which is no sum of matrices",
    ),
    "another name": (_renamed(".default.", ".second."), "is of an adapter of another name, or no weight"),
    "whole numbers": (
        _with(f"{AT}.lora_A.default.weight", torch.zeros(4, 48, dtype=torch.int8)),
        "is torch.int8; expected float32, bfloat16 or float16",
    ),
    "ranks that went apart": (_apart, r"mp_rank_01.*linear_qkv\.lora_A.* differs from .*mp_rank_00.*, by up to 0\.1"),
    "both spellings": (_both, "and another tensor that is the same"),
    "fused and single": (
        lambda states: [
            _with("decoder.layers.0.self_attention.linear_q.lora_A.default.weight", torch.zeros(4, 48))(states),
            _with("decoder.layers.0.self_attention.linear_q.lora_B.default.weight", torch.zeros(24, 4))(states),
        ],
        "self_attention.linear_qkv and self_attention.linear_q are both adapters on self_attn.q_proj; keep one",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoints(name: str, made: Made, base: Path, tmp_path: Path) -> None:
    change, message = DAMAGED[name]
    states = lora_files.rank_states(made.pairs, made.config, TP2, fused=True)
    change(states)
    arguments = {"num_layers": 4, "tensor_model_parallel_size": 2, "lora_r": RANK, "lora_alpha": ALPHA}
    adapter = lora_files.write(tmp_path / "adapter", states, arguments)
    with pytest.raises(UserError, match=message):
        merge(base, adapter, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 6}, "is an adapter for 6 layers, but the model has 4"),
        ({"lora_r": 8}, "its tensors have rank 4, but its arguments say lora_r 8"),
        ({"lora_alpha": None}, "does not say alpha"),
        ({"tensor_model_parallel_size": 2}, r"has shape \[80, 4\], expected \[40, 4\]"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: dict[str, Any], message: str, made: Made, base: Path, tmp_path: Path
) -> None:
    adapter = lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, **arguments)
    with pytest.raises(UserError, match=message):
        merge(base, adapter, tmp_path)


def test_grouped_experts_of_transformer_engine(hf_toy: HfToy, tmp_path: Path) -> None:
    """Their adapters have no place: no one is known to write such files."""
    made = make(hf_toy, "qwen3-moe", MLP, shared=True)
    source = lora_files.save_peft(tmp_path / "peft", made.pairs)
    flags = ["--hf-cfg-dir", str(made.hf), "--lora-target-modules", "linear_fc1", "linear_fc2", "--moe-grouped-gemm"]
    with pytest.raises(UserError, match=r"stores its parameters: .*experts.*lora_.\.weight of .* would be left out"):
        toys.run(source, tmp_path / "mg", *flags, "--transformer-impl", "transformer_engine")
    toys.run(source, tmp_path / "mg", *flags)


# Weights beside the adapter


def test_frozen_weights_beside_an_adapter(made: Made, base: Path, tmp_path: Path) -> None:
    """A whole LoRA checkpoint as --lora-load: its weights are compared with the base, and never taken."""
    toys.run(made.hf, tmp_path / "two", TP, "2")
    whole = lora_files.save_unified(tmp_path / "whole", tmp_path / "two", made.pairs, made.config, TP2)
    merge(base, whole, tmp_path, "--verify", "full")
    expect_close(tmp_path / "merged", made.expected)
    # The same with a base in 16 bit, of which these are the wider copy.
    narrow = {name: value.bfloat16() for name, value in made.weights.items()}
    source = toys.save_hf(tmp_path / "narrow", made.config, narrow)
    toys.run(source, tmp_path / "two16", TP, "2", "--params-dtype", "fp32")
    whole16 = lora_files.save_unified(tmp_path / "whole16", tmp_path / "two16", made.pairs, made.config, TP2)
    toys.run(source, tmp_path / "merged16", "--lora-load", str(whole16), "--verify", "full")

    other = {
        name: value + (1e-3 if name.endswith("layers.2.mlp.up_proj.weight") else 0)
        for name, value in made.weights.items()
    }
    changed = toys.save_hf(tmp_path / "changed", made.config, other)
    message = r"holds another model\.layers\.2\.mlp\.up_proj\.weight beside its adapter than .*changed: the adapter was"
    for mode in ("sample", "full", "none"):
        with pytest.raises(UserError, match=message):
            toys.run(changed, tmp_path / "no", "--lora-load", str(whole), "--verify", mode)


def test_some_weights_beside_an_adapter(made: Made, base: Path, tmp_path: Path) -> None:
    states = lora_files.rank_states(made.pairs, made.config, ONE, fused=True)
    states["mp_rank_00"]["model"]["decoder.layers.1.input_layernorm.weight"] = torch.ones(48)
    adapter = lora_files.write(tmp_path / "adapter", states, {"num_layers": 4, "lora_alpha": ALPHA})
    with pytest.raises(
        UserError, match="holds weights beside its adapter, but they are no model that could be compared"
    ):
        merge(base, adapter, tmp_path)


# What is said


def test_report_of_a_merge(made: Made, base: Path, tmp_path: Path) -> None:
    adapter = lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, TP2)
    done = toys.run(base, tmp_path / "merged", "--lora-load", str(adapter), of="mg", to="hf")
    found = json.loads((tmp_path / "merged" / "conversion_report.json").read_text())
    assert found["adapter"] == {
        "folder": str(adapter / "iter_0000020"),
        "merged": True,
        "rank": RANK,
        "alpha": ALPHA,
        "targets": ["linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"],
        "weights": {
            f"model.layers.*.{module}.weight": 4
            for module in sorted([*(f"self_attn.{n}" for n in ATTENTION), *(f"mlp.{n}" for n in MLP)])
        },
    }
    assert found["flags"]["lora_load"] == str(adapter)
    assert "rank 4, alpha 6, on linear_fc1 linear_fc2 linear_proj linear_qkv: merged into 28 tensors" in table(
        done.report, tmp_path / "merged"
    )
    toys.run(adapter, tmp_path / "peft", "--save-lora-to-hf", "--hf-cfg-dir", str(made.hf), of="mg", to="hf")
    alone = json.loads((tmp_path / "peft" / "conversion_report.json").read_text())
    assert alone["adapter"]["merged"] is False and alone["source"]["tensors"] == alone["output"]["tensors"] == 56
    assert alone["verification"]["output_tensors"] == 56


def test_dry_run(made: Made, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, TP2)
    directions = ["--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", str(base)]
    command.main([*directions, "--save-dir", str(tmp_path / "no"), "--lora-load", str(adapter), "--dry-run"])
    found = capsys.readouterr().out.splitlines()
    assert found[0].startswith("adapter: ") and found[0].endswith("merged into 28 tensors")
    assert "  model.layers.*.self_attn.q_proj.weight (4) + 6 / 4 * B A" in found
    flags = ["--save-lora-to-hf", "--dry-run"]
    command.main([*directions, "--save-dir", str(tmp_path / "no"), "--lora-load", str(adapter), *flags])
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown[0].endswith("converted alone; for 28 tensors")
    assert shown[1].startswith("adapter_model.safetensors: 56 tensors")
    assert any(
        line.startswith("base_model.model.model.layers.{0-3}.self_attn.k_proj.lora_A.weight [4, 48] float32 <- ")
        and "linear_qkv.lora_A.default.weight" in line
        for line in shown
    )
    assert not (tmp_path / "no").exists()


def test_verification_sees_a_fault_in_an_exported_adapter(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindspeed_llm.tasks.checkpoint import fill

    adapter = lora_files.save_megatron(tmp_path / "adapter", made.pairs, made.config, TP2)
    original = fill.assemble

    def swapped(target, slab, source):
        values = original(target, slab, source)
        return values.flip(0).contiguous() if target.key.endswith("layers.2.self_attn.v_proj.lora_B.weight") else values

    monkeypatch.setattr(fill, "assemble", swapped)
    with pytest.raises(
        UserError, match=r"verification failed, nothing was published: .*layers\.2\.self_attn\.v_proj\.lora_B"
    ):
        toys.run(adapter, tmp_path / "peft", "--save-lora-to-hf", "--hf-cfg-dir", str(made.hf), of="mg", to="hf")
    assert not (tmp_path / "peft").exists()
