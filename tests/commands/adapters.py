"""LoRA adapters for toys, in the files of PEFT, whose fused forms Megatron has: parts of one layer share their A."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, ALPHA = 8, 16
# Modules that are one linear layer on the Megatron side share what their A is made from.
_SHARED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "fc1"),
    **{"o_proj": "proj", "down_proj": "fc2"},
}
_MODULE = re.compile(r"(?P<module>model\.layers\.\d+\.(?:\w+\.)+(?P<last>\w+))\.weight")


def save_adapter(folder: Path, weights: Mapping[str, torch.Tensor], *, without: str = "$^") -> Path:
    """Write an adapter on all attention and MLP layers of a model, but those that match `without`."""
    tensors, targets = {}, set()
    for module, last, weight in _modules(weights, without):
        generator = torch.Generator().manual_seed(zlib.crc32(module.encode()))
        shared = torch.Generator().manual_seed(zlib.crc32(f"{module.removesuffix(last)}{_SHARED[last]}".encode()))
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=shared) / 8
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) / 8
        targets.add(last)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": sorted(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(weights: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with the adapter in them."""

    def of(name: str, weight: torch.Tensor) -> torch.Tensor:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" not in adapter:
            return weight
        a, b = (adapter[f"{prefix}.lora_{half}.weight"].double() for half in "AB")
        return _nearest(weight.double() + ALPHA / RANK * b @ a, weight.dtype)

    return {name: of(name, weight) for name, weight in weights.items()}


def _nearest(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest numbers of a dtype of 16 bit: torch rounds twice, and may give the one beside it."""
    assert dtype.itemsize == 2
    near = exact.to(dtype)
    for step in (-1, 1):
        other = (near.view(torch.int16) + step).view(dtype)
        near = torch.where((other.double() - exact).abs() < (near.double() - exact).abs(), other, near)
    return near


def _modules(weights: Mapping[str, torch.Tensor], without: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, weight in weights.items():
        found = _MODULE.fullmatch(name)
        if found and found["last"] in _SHARED and not re.search(without, name):
            yield found["module"], found["last"], weight
