"""The model of the Megatron backend: megatron-core's, with stretched rotary positions and without padded tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from mindspeed_llm.core.config import LlmConfig
from mindspeed_llm.core.noop_layer import without_gaps
from mindspeed_llm.core.rotary import ScaledRotaryEmbedding


class LlmGptModel(GPTModel):
    """megatron-core's `GPTModel`, see there; shapes are [B, S] for tokens and [S, B, H] inside.

    The rows of the embedding that stand for no token (padding of the vocabulary) have logits of minus infinity, so that
    they take no part in softmax, loss and sampling, and get no gradient.
    """

    config: LlmConfig

    def __init__(self, config: LlmConfig, *arguments: Any, rotary_percent: float = 1.0, **options: Any) -> None:
        super().__init__(config, *arguments, rotary_percent=rotary_percent, **options)
        if hasattr(self, "rotary_pos_emb"):
            self.rotary_pos_emb = ScaledRotaryEmbedding(
                config.kv_channels,
                rotary_percent,
                self.rotary_base,
                config.rope_scaling,
                rotary_interleaved=config.rotary_interleaved,
                cp_group=self.pg_collection.cp,
            )
            _tell_factor(config, self.rotary_pos_emb.factor)
        if self.post_process and self.vocab_size > config.vocab_size:
            self.output_layer.register_forward_hook(self._without_padding)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """What the layers of this stage make of tokens [B, S], or of the stage before, see `set_input_tensor`.

        Returns:
            [S, B, H]; of the last stage after the final norm.
        """
        decoder_input, rotary_pos_emb, *_ = self._preprocess(input_ids, position_ids)
        return self.decoder(hidden_states=decoder_input, attention_mask=None, rotary_pos_emb=rotary_pos_emb)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Of the last stage's hidden states [S, B, H], on all tensor parallel ranks those of all tokens: [S, B, V]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_states, weight=weight, runtime_gather_output=True)
        return logits[..., : self.config.vocab_size]

    def _without_padding(self, module: nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        width = logits.shape[-1]
        first = 0 if width == self.vocab_size else self.pg_collection.tp.rank() * width
        real = min(max(self.config.vocab_size - first, 0), width)
        if real < width:
            # In place: the layer's backward needs its input and weight only.
            logits[..., real:] = -torch.inf
        return logits, bias

    def sharded_state_dict(self, *arguments: Any, **options: Any) -> ShardedStateDict:
        """See `GPTModel`; layers go by their number in the model, whatever noop layers stand between them."""
        return without_gaps(super().sharded_state_dict(*arguments, **options), self.config.noop_layers)


def _tell_factor(config: LlmConfig, factor: float) -> None:
    """Tell megatron-core's attention the factor of cosines and sines, in the only words it has for one: it computes
    (0.1 * mscale * log(scaling) + 1) / (0.1 * mscale_all_dim * log(scaling) + 1).
    """
    if factor != 1.0:
        config.yarn_rotary_scaling_factor = math.e  # type: ignore[attr-defined]
        config.yarn_mscale = (factor - 1) / 0.1  # type: ignore[attr-defined]
        config.yarn_mscale_all_dim = 0.0  # type: ignore[attr-defined]
