"""Fill a sharded model from a Hugging Face directory; every rank reads only the bytes that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.adapter_names import without_adapters
from mindspeed_llm.fsdp2.checkpoint.hf_names import ModelWeights, map_to_model
from mindspeed_llm.fsdp2.checkpoint.weight_files import LazyTensor, full_index, open_weights
from mindspeed_llm.fsdp2.models.initialize import local_slices, local_tensor
from mindspeed_llm.observability.log import get_logger

logger = get_logger(__name__)


def read_weight_map(model: PreTrainedModel, folder: Path) -> ModelWeights:
    """Headers only: which stored tensor fills which parameter of `model`.

    Raises:
        UserError: see `open_weights` and `map_to_model`; weights that are quantised; two tied tensors of the files that
            differ.
    """
    stored = open_weights(folder)
    _refuse_quantised(stored, folder)
    weights = map_to_model(model, stored)
    if weights.ignored:
        logger.info(
            "%d tensors of the weight files are not part of %s: %s%s",
            len(weights.ignored),
            type(model).__name__,
            ", ".join(weights.ignored[:3]),
            " ..." if len(weights.ignored) > 3 else "",
        )
    for name, (tensor, canonical) in weights.aliases.items():
        _check_same(name, tensor, canonical, weights.tensors[canonical])
    return weights


@torch.no_grad()
def load_weights(model: PreTrainedModel, weights: ModelWeights) -> None:
    """Copy the stored values into the parameters and persistent buffers of `model` (DTensors or plain), casting to
    theirs. Adapters that the model got since `weights` were mapped are left alone.
    """
    state = without_adapters(model.state_dict())
    for name, tensor in weights.tensors.items():
        target = state[name]
        index = local_slices(target)
        local = local_tensor(target)
        if local.numel():
            local.copy_(tensor.read(index))


def _refuse_quantised(stored: Mapping[str, LazyTensor], folder: Path) -> None:
    """The codes of quantised weights are no weights, with or without the scales that belong to them."""
    quantised = [name for name, tensor in stored.items() if name.endswith("weight") and tensor.dtype.itemsize == 1]
    if quantised:
        kind = str(stored[quantised[0]].dtype).removeprefix("torch.")
        raise UserError(
            f"model.model_name_or_path: {folder} holds quantised weights ({len(quantised)} tensors, {quantised[0]} is "
            f"{kind}), which cannot be trained; take the model's weights in bfloat16, or convert block-wise fp8 to a "
            "Megatron checkpoint and back with convert_ckpt_v2.py, which dequantises it"
        )


def _check_same(name: str, tensor: LazyTensor, canonical: str, other: LazyTensor, rows: int = 4096) -> None:
    """Refuse files that hold two different values for weights that the configuration ties to one another."""
    same = tensor.shape == other.shape
    for start in range(0, tensor.shape[0] if same else 0, rows):
        index = (slice(start, min(start + rows, tensor.shape[0])), *full_index(tensor.shape)[1:])
        same = same and torch.equal(tensor.read(index), other.read(index))
    if not same:
        raise UserError(
            f"model.model_name_or_path: config.json ties {name} to {canonical} (tie_word_embeddings), but the weight "
            "files hold two different tensors for them; set tie_word_embeddings to false in config.json or remove one"
        )
