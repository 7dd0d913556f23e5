"""Which tensors of a model are loaded: all, its own weights, or its adapters."""

from __future__ import annotations

from enum import Enum

from mindspeed_llm.tasks.checkpoint.adapter_reader import adapter_key, base_key


class Part(Enum):
    """A part of a model. Weights of layers with adapters go by the names that they have without."""

    ALL = "all"
    BASE = "base"
    ADAPTERS = "adapters"

    def name_of(self, key: str) -> str | None:
        """What a tensor of a model, or of a checkpoint, is called here; None where it is not of this part."""
        adapter, base = adapter_key(key), base_key(key)
        if self is Part.ALL:
            return adapter or base
        return adapter if self is Part.ADAPTERS else base
