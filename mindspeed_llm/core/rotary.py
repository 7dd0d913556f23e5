"""Rotary positions whose frequencies are stretched for longer sequences: linear, Llama 3, YaRN.

Formulas: linear interpolation, Chen et al. 2023 (arXiv:2306.15595); Llama 3.1, section 3.4.1 and its published
configuration; YaRN, Peng et al. 2023 (arXiv:2309.00071), equations 15 to 17 and appendix A.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from mindspeed_llm.errors import UserError


def rotary_frequencies(dim: int, base: float, scaling: Mapping[str, Any] | None) -> tuple[torch.Tensor, float]:
    """The angle per position of each pair of elements, and the factor of the cosines and sines.

    Args:
        dim: how many elements of a head turn.
        base: the base of the wavelengths.
        scaling: `rope_type` (default, linear, llama3, yarn) and its parameters, in the words of transformers'
            config.json; None: default.

    Returns:
        fp32 [dim / 2], and the factor (1 but for YaRN).

    Raises:
        UserError: an unknown type.
    """
    frequencies = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    scaling = scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(frequencies, dim, base, scaling)
    raise UserError(f"rope type {kind!r} is not known here; expected default, linear, llama3 or yarn")


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    known = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    share = ((known / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def _yarn(frequencies: torch.Tensor, dim: int, base: float, scaling: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    factor, known = scaling["factor"], scaling["original_max_position_embeddings"]

    def turning(rotations: float) -> float:
        """The pair of elements that makes so many turns over the context that the model was trained on."""
        return dim * math.log(known / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = turning(scaling.get("beta_fast") or 32), turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = max(last - first, 0.001)
    stretched = ((torch.arange(dim // 2).float() - first) / span).clamp(0, 1)
    frequencies = frequencies / factor * stretched + frequencies * (1 - stretched)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = growth(mscale) / growth(of_all) if mscale and of_all else growth(1.0)
    return frequencies, float(attention_factor)


class ScaledRotaryEmbedding(RotaryEmbedding):
    """megatron-core's rotary embedding with the frequencies of `rotary_frequencies`.

    The factor of the cosines and sines is not part of the angles that megatron-core passes on; `factor` is for the
    attention layers.
    """

    positions: torch.Tensor | None = None
    """[B, S], of the tokens of each row, in generation; None: each row begins with 0."""

    def __init__(
        self, kv_channels: int, rotary_percent: float, base: float, scaling: Mapping[str, Any] | None, **options: Any
    ) -> None:
        super().__init__(kv_channels, rotary_percent, rotary_base=base, **options)
        dim = int(kv_channels * rotary_percent)
        frequencies, self.factor = rotary_frequencies(dim, base, scaling)
        self.inv_freq = frequencies.to(self.inv_freq.device)

    def forward(self, max_seq_len: int, *arguments: Any, **options: Any) -> torch.Tensor:
        """The angles: [S, 1, 1, R], or [S, B, 1, R] with `positions`."""
        if self.positions is None:
            return super().forward(max_seq_len, *arguments, **options)
        assert not self.rotary_interleaved, "pairs of neighbouring channels are not turned here"
        self.inv_freq = self.inv_freq.to(self.positions.device)
        angles = self.positions.t()[:, :, None, None].to(self.inv_freq.dtype) * self.inv_freq
        return torch.cat((angles, angles), dim=-1)
