"""The core of self-attention on megatron-core's layers: causal, packed documents, sliding window, grouped KV heads.

megatron-core's own local module refuses packed documents and repeats the KV heads in memory.

Shape letters: S sequence, B micro batch, N query heads and G KV heads of this rank, D head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from mindspeed_llm.core.config import LlmConfig
from mindspeed_llm.core.key_value_cache import LayerMemory
from mindspeed_llm.platform import operators


class CoreAttention(MegatronModule):
    """Softmax attention of one layer.

    `attention_mask` is None, or which document each token belongs to: integers [B, S]. A token sees the tokens of its
    own document that are not behind it; what a mask of booleans would say of them follows. With `window_size` (w, 0) of
    the configuration, it sees itself and the w tokens before.
    """

    def __init__(
        self,
        config: LlmConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        assert attention_type == "self", f"only self-attention is computed here, not {attention_type}"
        assert config.context_parallel_size == 1, "context parallelism is refused when arguments are checked"
        self._scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, max(1, layer_number))
        self._seen_before = config.window_size[0] if windowed and config.window_size else None
        self._attend = operators.attention if config.flash_attention else self._with_scores
        self.memory: LayerMemory | None = None
        """What is known of the tokens before, in generation; see `key_value_cache.remembering`."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [S, B, N, D], key and value [S, B, G, D] -> [S, B, N * D]"""
        assert attention_bias is None and packed_seq_params is None, "documents are told by attention_mask"
        if self.memory is not None:
            return self._with_memory(self.memory, query, key, value)
        mask = self._visible(query.shape[0], key.shape[0], attention_mask, query.device)
        dropout = self._dropout if self.training else 0.0
        if dropout > 0 and not self.config.sequence_parallel:
            # Ranks hold different heads of the same tokens and need random numbers of their own.
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return self._merged(query, key, value, mask, dropout)
        return self._merged(query, key, value, mask, dropout)

    def _with_memory(self, memory: LayerMemory, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values, mask = memory.extended(key, value, self._seen_before)
        length, batch, heads, width = query.shape
        q = query.permute(1, 2, 0, 3)
        if length == 1:
            # The query heads of a group stand for queries of one head: no kernel has to repeat keys and values.
            q = q.reshape(batch, key.shape[2], heads // key.shape[2], width)
        out = self._attend(
            q, keys, values, mask=mask, is_causal=mask is None and length > 1, scale=self._scale, dropout=0.0
        )
        return out.reshape(batch, heads, length, -1).permute(2, 0, 1, 3).flatten(2)

    def _merged(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = self._attend(q, k, v, mask=mask, is_causal=True, scale=self._scale, dropout=dropout)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _visible(self, queries: int, keys: int, documents: Tensor | None, device: torch.device) -> Tensor | None:
        """[B or 1, 1, S, S], True where a query sees a key, apart from those behind it; None: all."""
        mask = None
        if documents is not None:
            assert not documents.is_floating_point() and documents.dtype != torch.bool, "expected numbers of documents"
            mask = (documents[:, :, None] == documents[:, None, :])[:, None]
        if self._seen_before is not None and self._seen_before < keys - 1:
            behind = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
            near = (behind <= self._seen_before)[None, None]
            mask = near if mask is None else mask & near
        return mask

    def _with_scores(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float, dropout: float
    ) -> Tensor:
        """`operators.attention` step by step: the scores are in memory, in fp32 where the configuration says so."""
        batch, heads, length, _ = q.shape
        groups = k.shape[1]
        q = q.reshape(batch, groups, heads // groups, length, -1)
        scores = torch.einsum("bgnsd,bgtd->bgnst", q, k) * scale
        visible = torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device)
        if is_causal:
            visible = visible.tril(k.shape[2] - length)
        if mask is not None:
            visible = visible & mask[:, :, None]
        if self.config.attention_softmax_in_fp32:
            scores = scores.float()
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(q.dtype)
        weights = torch.nn.functional.dropout(weights, dropout)
        return torch.einsum("bgnst,bgtd->bgnsd", weights, v).reshape(batch, heads, length, -1)
