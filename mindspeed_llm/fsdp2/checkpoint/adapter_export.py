"""Write the adapters of a sharded model as a folder that PEFT reads, and add them to the model's weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_llm.fsdp2.checkpoint.adapter_names import ADAPTER, is_adapter, name_in_file
from mindspeed_llm.fsdp2.checkpoint.publish import publish
from mindspeed_llm.fsdp2.config.adapter_files import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from peft import LoraConfig

_STAGING = ".adapter_export"


@torch.no_grad()
def export_adapter(
    model: nn.Module,
    folder: Path,
    *,
    config: LoraConfig,
    dtype: torch.dtype,
    is_writer: bool,
    save_tokenizer: Callable[[Path], object] | None = None,
) -> None:
    """Gather the adapters (a collective) and write them, adapter_config.json and the tokenizer on the writing rank.

    Everything is written into a staging folder first and moved over at the end, adapter_config.json last. An earlier
    export, a model's or a merged one's as well, is no longer there afterwards; see `publish`.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        if is_adapter(name):
            whole = _whole(tensor)
            if is_writer:
                tensors[name_in_file(name)] = whole.to(device="cpu", dtype=dtype).contiguous()
    if not is_writer:
        return
    staging = folder / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        if save_tokenizer is not None:
            save_tokenizer(staging)
        text = json.dumps(_plain(config), indent=2, sort_keys=True, ensure_ascii=False)
        (staging / CONFIG).write_text(text + "\n", encoding="utf-8")
        with (staging / WEIGHTS).open("rb") as stream:
            os.fsync(stream.fileno())
        publish(staging, folder, last=CONFIG)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def adapter_changes(model: nn.Module) -> dict[str, Callable[[], torch.Tensor]]:
    """What adapters add to the weights of their layers: name of the weight without adapters -> a collective that gives
    the whole of it, scale * B A in fp32.
    """
    state = model.state_dict()
    changes = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            a, b = (state[f"{name}.lora_{half}.{ADAPTER}.weight"] for half in "AB")
            changes[f"{name}.weight"] = _product(a, b, module.scaling[ADAPTER])
    return changes


def _product(a: torch.Tensor, b: torch.Tensor, scale: float) -> Callable[[], torch.Tensor]:
    return lambda: (_whole(b).float() @ _whole(a).float()) * scale


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain(config: LoraConfig) -> dict[str, Any]:
    """The configuration as PEFT's `save_pretrained` writes it: sets as sorted lists, ready for inference."""
    values = {**config.to_dict(), "inference_mode": True}
    return {
        name: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for name, value in values.items()
    }
