"""How the weights of a Hugging Face directory are stored: as they are, in block-wise fp8, in MXFP4; no other way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.fp8 import SCALE, Fp8Source, is_fp8
from mindspeed_llm.tasks.checkpoint.hf_reader import StoredHf
from mindspeed_llm.tasks.checkpoint.model import HfTensor
from mindspeed_llm.tasks.checkpoint.mxfp4 import Mxfp4Source, is_mxfp4
from mindspeed_llm.tasks.checkpoint.sources import HfSource, Source

# compressed-tensors has written its own key, too.
_KEYS = ("quantization_config", "compression_config")
_METHODS = ("fp8", "mxfp4")
_FP8_BLOCK = [128, 128]


@dataclass(frozen=True, kw_only=True)
class Dequantised:
    """What was quantised in a source: so many tensors, each of which is stored as two."""

    tensors: int
    stored_as: str
    scales: str
    """What the second one is called, behind the name of the tensor."""


_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def refuse_other_types(source: Source, tensors: Mapping[str, HfTensor]) -> None:
    """Refuse weights that are no floating point numbers of 16 bit or more, after what was dequantised.

    Args:
        tensors: of the model.

    Raises:
        UserError: names the tensor and its type.
    """
    for name in tensors.keys() & source.names():
        if (dtype := source.dtype(name)) not in _WEIGHTS:
            raise UserError(
                f"{name} is {str(dtype).removeprefix('torch.')}, which no weight is; expected one of "
                f"{', '.join(str(each).removeprefix('torch.') for each in _WEIGHTS)}. Quantised weights need their "
                "scales beside them; convert from those that the model was quantised from"
            )


def open_source(
    stored: Mapping[str, StoredHf], expected: Mapping[str, HfTensor], config: Mapping[str, Any], where: str
) -> tuple[Source, Dequantised | None]:
    """The source that reads a directory, and what it dequantises on the way.

    Args:
        config: the whole config.json that belongs to the weights; `where` it was found.

    Raises:
        UserError: the weights are quantised in another way, or damaged; see the sources.
    """
    quantisation = _quantisation(config, where)
    if is_fp8(stored):
        block = _fp8_block(quantisation, where)
        source = Fp8Source(stored, expected, block)
        stored_as = f"float8_e4m3fn in blocks {list(block)}"
        return source, Dequantised(tensors=source.dequantised, stored_as=stored_as, scales=SCALE)
    if is_mxfp4(stored, expected):
        packed = Mxfp4Source(stored, expected)
        return packed, Dequantised(tensors=packed.dequantised, stored_as="mxfp4", scales="_scales")
    return HfSource(stored, expected), None


def _quantisation(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """What config.json says about quantisation; empty where that is nothing.

    It may say more than the weights bear out: those that were dequantised often keep it.
    """
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    said = next(((key, part[key]) for key in _KEYS for part in parts if part.get(key)), None)
    if said is None:
        return {}
    key, found = said
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if method not in _METHODS:
        raise UserError(
            f"{where}: {key}.quant_method is {method!r}; of quantised weights, only those of {' and '.join(_METHODS)} "
            "(block-wise fp8, MXFP4) can be read. Convert from the weights that the model was quantised from, or "
            f"dequantise it first with the library that quantised it; if it is not quantised, remove {key}"
        )
    return found


def _fp8_block(quantisation: Mapping[str, Any], where: str) -> tuple[int, int]:
    block = quantisation.get("weight_block_size", _FP8_BLOCK)
    good = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if not good:
        raise UserError(
            f"{where}: quantization_config.weight_block_size is {block}; expected the rows and columns that have one "
            f"scale, as {_FP8_BLOCK}. Weights with scales per tensor or per channel cannot be read, convert from the "
            "bf16 weights of the model"
        )
    return block[0], block[1]
