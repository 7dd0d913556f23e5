"""The switches for fused operators: what they replace, what they leave alone, what they say, and that numbers stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from mindspeed_llm.fsdp2.config import OptimizationConfig
from mindspeed_llm.fsdp2.models import fused
from mindspeed_llm.fsdp2.models.fused import (
    ATTENTION_NAME,
    apply_fused_operators,
    attention_forward,
    choose_attention,
    restore_rotary,
)
from mindspeed_llm.platform import operators
from tests.support.toys import TOYS, build_toy

GEMMA2 = {key: value for key, value in TOYS["gemma"].items() if key != "model_type"} | {"model_type": "gemma2"}


def build(fields: dict[str, Any], *, use_flash_attn: bool) -> PreTrainedModel:
    """A model with random weights; transformers' sdpa, or the implementation that the switch chooses."""
    fields = dict(fields)
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    chosen: str | None = "sdpa"
    if use_flash_attn:
        chosen = choose_attention(config, AutoModelForCausalLM._model_mapping[type(config)], use_flash_attn=True)
    torch.manual_seed(0)
    options = {"attn_implementation": chosen} if chosen else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape) + (parameter.ndim == 1))
    return model.eval()


@pytest.fixture
def rotary_restored() -> Iterator[list[PreTrainedModel]]:
    """Models that are put in here get their rotary function back after the test."""
    models: list[PreTrainedModel] = []
    yield models
    for model in models:
        restore_rotary(model)


def logits_and_gradients(model: PreTrainedModel, **inputs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    logits = model(**inputs, use_cache=False).logits
    visible = inputs.get("attention_mask")
    kept = logits if visible is None else logits[visible.bool()]
    kept.float().pow(2).mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return kept.detach(), gradients


def assert_same(found: tuple, expected: tuple) -> None:
    assert ((found[0] - expected[0]).abs().max() / expected[0].std()) < 1e-5
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


# --- Attention


def inputs_of(kind: str) -> dict[str, torch.Tensor]:
    """Token ids of [2, 24], and what `kind` says about which of them see each other."""
    ids = torch.randint(3, 509, (2, 24), generator=torch.Generator().manual_seed(5))
    if kind == "padded right":
        return {"input_ids": ids, "attention_mask": torch.tensor([[1] * 24, [1] * 15 + [0] * 9])}
    if kind == "padded left":
        return {"input_ids": ids, "attention_mask": torch.tensor([[1] * 24, [0] * 9 + [1] * 15])}
    if kind == "packed":
        rows = [[*range(7), *range(17)], [*range(12), *range(11), 0]]
        return {"input_ids": ids, "position_ids": torch.tensor(rows)}
    return {"input_ids": ids}


@pytest.mark.parametrize("kind", ["plain", "padded right", "padded left", "packed"])
@pytest.mark.parametrize("toy", ["llama", "qwen3", "gemma3_text"])  # 6 heads on 2 KV heads; gemma 3 slides over 8
def test_attention_equals_sdpa_of_transformers(toy: str, kind: str) -> None:
    theirs, ours = (build(TOYS[toy], use_flash_attn=flash) for flash in (False, True))
    assert ours.config._attn_implementation == ATTENTION_NAME
    assert theirs.config._attn_implementation == "sdpa"
    inputs = inputs_of(kind)
    assert_same(logits_and_gradients(ours, **inputs), logits_and_gradients(theirs, **inputs))


def test_packed_rows_do_not_see_each_other() -> None:
    model = build(TOYS["llama"], use_flash_attn=True)
    inputs = inputs_of("packed")
    with torch.no_grad():
        before = model(**inputs, use_cache=False).logits
        inputs["input_ids"][0, 3] += 1
        after = model(**inputs, use_cache=False).logits
    assert torch.equal(before[0, 7:], after[0, 7:])
    assert not torch.equal(before[0, 3:7], after[0, 3:7])


def test_the_operator_really_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(TOYS["llama"], use_flash_attn=True)
    original, calls = operators.attention, []

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        calls.append((options["mask"] is None, options["is_causal"], args[1].shape[1]))
        return original(*args, **options)

    monkeypatch.setattr(operators, "attention", watched)
    model(**inputs_of("plain"))
    assert calls == [(True, True, 2)] * 4  # causal without a mask, and KV heads are not repeated
    calls.clear()
    model(**inputs_of("padded right"))
    assert calls == [(False, False, 2)] * 4


def test_dropout_and_scale_reach_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.update(options)
        return q

    monkeypatch.setattr(operators, "attention", watched)
    q = torch.zeros(1, 2, 3, 16)
    output, weights = attention_forward(nn.Module(), q, q, q, None, dropout=0.25, scaling=0.5)
    assert output.shape == (1, 3, 2, 16) and weights is None
    assert (seen["dropout"], seen["scale"], seen["is_causal"]) == (0.25, 0.5, True)
    attention_forward(nn.Module(), q, q, q, None)
    assert (seen["dropout"], seen["scale"]) == (0.0, 0.25)
    attention_forward(nn.Module(), q[:, :, :1], q, q, None)
    assert seen["is_causal"] is False  # one query sees all keys
    attention_forward(nn.Module(), q, q, q, None, is_causal=False)
    assert seen["is_causal"] is False


def test_a_model_with_a_soft_cap_keeps_its_own_attention_and_says_so() -> None:
    model = build(GEMMA2, use_flash_attn=True)
    assert model.config._attn_implementation == "eager"
    (line,) = apply_fused_operators(model, OptimizationConfig(use_flash_attn=True))
    assert line == (
        "attention: transformers' eager instead of use_flash_attn, since Gemma2ForCausalLM declares no support for it"
    )


@pytest.mark.parametrize("extra", ["softcap", "s_aux", "position_bias"])
def test_what_a_fused_operator_does_not_compute_is_refused(extra: str) -> None:
    q = torch.zeros(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match=f"does not compute {extra}"):
        attention_forward(nn.Module(), q, q, q, None, **{extra: torch.ones(2)})
    attention_forward(nn.Module(), q, q, q, None, **{extra: None})


# --- RMSNorm


@pytest.mark.parametrize("toy", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
def test_fused_norms_change_no_number(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other = build_toy(toy), build_toy(toy)
    norms = sum("RMSNorm" in type(module).__name__ for module in plain.modules())
    lines = apply_fused_operators(other, OptimizationConfig(use_fused_rmsnorm=True))
    assert f"RMSNorm: torch rms_norm (composed) on {norms} modules (use_fused_rmsnorm)" in lines
    original, offsets = operators.rms_norm, []

    def watched(*args: Any, unit_offset: bool) -> torch.Tensor:
        offsets.append(unit_offset)
        return original(*args, unit_offset=unit_offset)

    monkeypatch.setattr(operators, "rms_norm", watched)
    assert_same(logits_and_gradients(other, **inputs_of("plain")), logits_and_gradients(plain, **inputs_of("plain")))
    assert offsets == [toy.startswith("gemma")] * norms


class DoubledRMSNorm(modeling_llama.LlamaRMSNorm):
    """Called a norm, but it computes something else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


def test_a_norm_that_computes_something_else_keeps_its_own_code() -> None:
    model = build_toy("llama")
    model.model.norm = DoubledRMSNorm(48)
    model.model.layers[0].input_layernorm = Qwen3NextRMSNormGated(48)  # takes a second tensor, the gate
    lines = apply_fused_operators(model, OptimizationConfig(use_fused_rmsnorm=True))
    assert lines[-1] == (
        "RMSNorm: torch rms_norm (composed) on 7 modules (use_fused_rmsnorm); 2 keep their own code, which computes "
        "something else: model.layers.0.input_layernorm, ..."
    )
    hidden = torch.randn(1, 2, 48)
    assert torch.equal(model.model.norm(hidden), DoubledRMSNorm.forward(model.model.norm, hidden))


@pytest.mark.parametrize("meta", [False, True])
def test_norms_are_tried_out_without_touching_the_model(meta: bool) -> None:
    model = build_toy("gemma")
    if meta:
        model = model.to("meta")
    before = {name: parameter for name, parameter in model.named_parameters()}
    rng = torch.get_rng_state()
    apply_fused_operators(model, OptimizationConfig(use_fused_rmsnorm=True))
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.model.norm.forward.args == (model.model.norm, True)


# --- Rotary position embedding


@pytest.mark.parametrize("toy", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_fused_rotary_changes_no_number_and_is_taken_back(toy: str, rotary_restored: list, monkeypatch: Any) -> None:
    model = build_toy(toy)
    rotary_restored.append(model)
    expected = logits_and_gradients(model, **inputs_of("plain"))
    file = fused._modelling_files(model)[-1]
    before = file.apply_rotary_pos_emb
    lines = apply_fused_operators(model, OptimizationConfig(use_fused_rotary_pos_emb=True))
    assert lines[-1] == "rotary embedding: torch rotary (composed) (use_fused_rotary_pos_emb)"
    calls: list[int] = []
    original = operators.rotary
    monkeypatch.setattr(operators, "rotary", lambda *a, **o: calls.append(1) or original(*a, **o))
    assert_same(logits_and_gradients(model, **inputs_of("plain")), expected)
    assert len(calls) == 4
    assert apply_fused_operators(model, OptimizationConfig(use_fused_rotary_pos_emb=True)) == lines  # twice is once
    restore_rotary(model)
    assert file.apply_rotary_pos_emb is before


def test_a_model_that_rotates_differently_keeps_its_own_code() -> None:
    config = CONFIG_MAPPING["cohere"](
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=3
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # rotates neighbouring dimensions
    line = apply_fused_operators(model, OptimizationConfig(use_fused_rotary_pos_emb=True))[-1]
    assert line == (
        "rotary embedding: the model's own code instead of use_fused_rotary_pos_emb, since "
        "transformers.models.cohere.modeling_cohere rotates differently"
    )


def test_a_model_without_rotary_embedding() -> None:
    config = CONFIG_MAPPING["gpt2"](vocab_size=61, n_embd=24, n_layer=1, n_head=3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    line = apply_fused_operators(model, OptimizationConfig(use_fused_rotary_pos_emb=True))[-1]
    assert line.endswith("since GPT2LMHeadModel has no apply_rotary_pos_emb")


# --- The lines


def test_the_lines_of_a_model_with_everything_off() -> None:
    assert apply_fused_operators(build(TOYS["llama"], use_flash_attn=False), OptimizationConfig()) == [
        "attention: transformers' sdpa"
    ]


def test_experts() -> None:
    lines = apply_fused_operators(build_toy("qwen3_moe"), OptimizationConfig())
    assert lines[1] == "experts: eager (moe_grouped_gemm: False)"
    lines = apply_fused_operators(build_toy("llama"), OptimizationConfig(moe_grouped_gemm=True))
    assert lines[1] == "no effect from optimization.moe_grouped_gemm: LlamaForCausalLM has no experts"
