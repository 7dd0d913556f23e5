"""Adapters in PEFT's files that a job is not filled with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.boxes import Box, take
from mindspeed_llm.tasks.checkpoint.sources import Fragment
from mindspeed_llm.tasks.models.hf_adapters import FiniteOnly


class Tensors:
    """A source in memory."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        yield box, take(self.tensors[name], box)

    def fragments(self, name: str, box: Box) -> Iterator[Fragment]:
        yield Fragment(box=box, file="f", key=name, shape=tuple(self.tensors[name].shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_refused(value: float, dtype: torch.dtype) -> None:
    good, bad = torch.ones(4, 2, dtype=dtype), torch.ones(4, 2, dtype=dtype)
    bad[3, 1] = value
    source = FiniteOnly(Tensors(good=good, bad=bad), Path("folder/adapter_model.safetensors"))
    whole = ((0, 4), (0, 2))
    [(box, values)] = source.read("good", whole)
    assert box == whole and torch.equal(values, good)
    with pytest.raises(UserError, match=r"--lora-load: folder/adapter_model\.safetensors holds NaN .* in bad first"):
        list(source.read("bad", whole))
    assert source.names() == {"good", "bad"} and source.dtype("bad") == dtype
    assert next(source.fragments("bad", whole)).key == "bad"
