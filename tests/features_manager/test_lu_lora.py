"""The flags of LU-LoRA: what they say, and what is refused."""

from __future__ import annotations

import pytest

from mindspeed_llm.core.lora.local_settings import LocalSettings, local_settings
from mindspeed_llm.errors import UserError
from tests.training.arguments.lines import EXPERTS, arguments

_QKV = "--lora-target-modules linear_qkv"
_ONE = "--lu-lora-final-layer-index 1"


def test_settings() -> None:
    assert local_settings(arguments()) is None
    # The defaults are MindSpeed-LLM's.
    assert local_settings(arguments(f"{_QKV} {_ONE}")) == LocalSettings(final_layer=1, rate=1.25e-6, ratio=1.0)
    more = "--lu-lora-lr 1e-3 --lu-lora-lr-ratio 24"
    assert local_settings(arguments(f"{_QKV} {_ONE} {more}")) == LocalSettings(final_layer=1, rate=1e-3, ratio=24.0)


def test_rates_without_layers_are_named() -> None:
    notices = " ".join(arguments(f"{_QKV} --lu-lora-lr 1e-3 --lu-lora-lr-ratio 24").notices)
    for flag in ("--lu-lora-lr", "--lu-lora-lr-ratio"):
        assert f"{flag} has no effect without --lu-lora-final-layer-index" in notices


@pytest.mark.parametrize(
    "flags",
    [
        f"{_QKV} --lu-lora-final-layer-index 2",
        # Layers of noops are not counted: these are layers 0 to 3, of which 1 stands at position 3.
        f"{_QKV} --num-layers 6 --noop-layers 0,2 --lu-lora-final-layer-index 2",
        f"{_QKV} {EXPERTS} {_ONE}",
        f"{_QKV} linear_fc1 {EXPERTS} --first-k-dense-replace 2 --moe-layer-freq 1 {_ONE}",
    ],
)
def test_accepted(flags: str) -> None:
    assert local_settings(arguments(flags)) is not None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (_ONE, "--lora-target-modules names no layers to have any"),
        (f"{_QKV} --lu-lora-final-layer-index -1", "expected a whole number of 0 or more"),
        (f"{_QKV} --lu-lora-final-layer-index 3", "expected 0 to 2"),
        (f"{_QKV} --num-layers 6 --noop-layers 0,2 --lu-lora-final-layer-index 3", "layers are 0 to 3"),
        (f"{_QKV} --num-layers 1 --lu-lora-final-layer-index 0", "leave --lu-lora-final-layer-index out"),
        (f"{_QKV} {_ONE} --lu-lora-lr -1", "--lu-lora-lr: expected a number above 0"),
        (f"{_QKV} {_ONE} --lu-lora-lr-ratio 0", "--lu-lora-lr-ratio: expected a number above 0"),
        (f"{_QKV} linear_fc2 {EXPERTS} {_ONE}", "layer 0 has experts"),
        (
            f"{_QKV} linear_fc2 {EXPERTS} --first-k-dense-replace 1 --moe-layer-freq 1 {_ONE}",
            "give --lora-target-modules without linear_fc2, or --lu-lora-final-layer-index 0",
        ),
        (f"{_QKV} {_ONE} --lr 0", "local updates follow the schedule of --lr"),
        (
            f"{_QKV} {_ONE} --lu-lora-lr-ratio 24 --lr-warmup-fraction 0.1 --lr-warmup-init 1e-4",
            "leave --lr-warmup-init out",
        ),
    ],
)
def test_refused(flags: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        arguments(flags)
    assert message in str(refusal.value)
