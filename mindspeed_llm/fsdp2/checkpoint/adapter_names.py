"""Names of parameters in a model with adapters.

PEFT puts a layer of its own in the place of a linear layer, which then lies one level deeper:

    without              with an adapter                          in an adapter's file
    X.weight             X.base_layer.weight                      -
    -                    X.lora_A.default.weight [rank, in]       base_model.model.X.lora_A.weight
    -                    X.lora_B.default.weight [out, rank]      base_model.model.X.lora_B.weight
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

ADAPTER = "default"
"""PEFT's name for the one adapter of a model."""

_PREFIX = "base_model.model."
BASE = ".base_layer."
"""In the names of what a layer with an adapter holds besides it."""

_HALVES = (f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight")
Value = TypeVar("Value")


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of an adapter."""
    return name.endswith(_HALVES)


def original_name(name: str) -> str:
    """The name that a parameter of the model has without adapters."""
    return name.replace(BASE, ".")


def name_in_file(name: str) -> str:
    """The name in PEFT's file of a parameter of an adapter."""
    return _PREFIX + name.removesuffix(f".{ADAPTER}.weight") + ".weight"


def without_adapters(state: Mapping[str, Value]) -> dict[str, Value]:
    """What a model holds besides adapters, under the names that it has without them."""
    return {original_name(name): value for name, value in state.items() if not is_adapter(name)}
