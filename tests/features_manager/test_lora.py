"""The flags of LoRA: what they say, and what is refused."""

from __future__ import annotations

import pytest

from mindspeed_llm.core.lora.settings import LoraSettings, lora_settings
from mindspeed_llm.errors import UserError
from tests.training.arguments.lines import EXPERTS, arguments

_QKV = "--lora-target-modules linear_qkv"


def test_settings() -> None:
    assert lora_settings(arguments()) is None
    found = lora_settings(arguments("--lora-target-modules linear_q linear_fc1 --seed 7"))
    # Rank and alpha are MindSpeed-LLM's.
    assert found == LoraSettings(rank=16, alpha=32.0, targets=("linear_q", "linear_fc1"), seed=7)
    assert found.scale == 2.0
    assert found.parts_of("linear_qkv") == ("linear_q",)
    assert found.parts_of("linear_fc1") == ("linear_fc1",)
    assert found.parts_of("linear_proj") == ()


def test_flags_without_effect_are_named() -> None:
    assert "--lora-fusion has no effect" in " ".join(arguments("--lora-fusion").notices)


def test_adapters_beside_random_weights_are_named() -> None:
    assert "LoRA leaves them so" in " ".join(arguments(_QKV).notices)
    assert "random" not in " ".join(arguments(f"{_QKV} --load x").notices)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-r 4", "--lora-r 4 is for adapters, but --lora-target-modules names no layers"),
        ("--lora-alpha 8", "--lora-alpha 8 is for adapters, but --lora-target-modules names no layers"),
        ("--lora-load x", "--lora-target-modules names no layers"),
        ("--lora-ckpt-filter", "--lora-target-modules names no layers"),
        (f"{_QKV} --lora-r 0", "expected a whole number of 1 or more, found '0'"),
        (f"{_QKV} --lora-alpha 0", "adapters would be multiplied by 0"),
        ("--lora-target-modules linear_qvk", "did you mean linear_qkv?"),
        ("--lora-target-modules q_proj", "expected one of linear_qkv, linear_proj"),
        (f"{_QKV} linear_k", "linear_qkv and linear_k are both adapters on one layer"),
        (f"{_QKV} linear_proj linear_qkv", "linear_qkv stands there twice"),
        (
            f"{EXPERTS} --moe-grouped-gemm --lora-target-modules linear_fc1_gate",
            "for linear_fc1_gate experts would get none; give linear_fc1",
        ),
        (
            f"{EXPERTS} --moe-grouped-gemm --moe-shared-expert-intermediate-size 32 --lora-target-modules linear_fc2 "
            "linear_fc1_up",
            "for linear_fc1_up experts would get none; give linear_fc1",
        ),
        (f"{_QKV} --lora-modules-to-save word_embeddings", "adapters alone are trained, no modules beside them"),
        (f"{_QKV} --save-lora-to-hf", "none is saved; add --save DIR"),
        ("--save-lora-to-hf --save x", "--lora-target-modules names no layers"),
        (f"{_QKV} --save x --hf-save-dir y", "add --save-lora-to-hf, or leave --hf-save-dir out"),
        (f"{_QKV} --save x --hf-cfg-dir y", "add --save-lora-to-hf, or leave --hf-cfg-dir out"),
    ],
)
def test_refused(flags: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        arguments(flags)
    assert message in str(refusal.value)
