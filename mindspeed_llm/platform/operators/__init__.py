"""Fused operators: one function each, with implementations for npu, cuda and plain torch behind it.

The functions are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_llm.platform.operators.dispatch import attention, implementation, rms_norm, rotary, rotate, swiglu

__all__ = ["attention", "implementation", "rms_norm", "rotary", "rotate", "swiglu"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("mindspeed_llm.platform.operators.dispatch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
