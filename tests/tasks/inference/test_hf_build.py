"""Models whose tokens see later ones are refused before their weights are read; measured on what transformers computes
for the same configuration.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    RemBertConfig,
    XLMConfig,
    XLNetConfig,
)

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.model_config import ModelConfig
from mindspeed_llm.tasks.inference.adapters.hf_build import on_meta

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
GEMMA = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "layer_types": ["full_attention"] * 2}
XLM = {"vocab_size": 60, "n_words": 60, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 32}


@torch.no_grad()
def is_causal(config: PretrainedConfig) -> bool:
    """Whether another last token leaves the logits of the first ones as they are."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.3)
    text = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    logits = model(input_ids=text, attention_mask=torch.ones_like(text)).logits[:, :3]
    return bool((logits[0] - logits[1]).abs().max() < 1e-5)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BertConfig(**SIZES), "is_decoder false"),
        (BertConfig(**SIZES, is_decoder=True), None),
        (RemBertConfig(**SIZES), "is_decoder false"),
        (XLMConfig(**XLM), "causal false"),
        (XLMConfig(**XLM, causal=True), None),
        (Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True), "use_bidirectional_attention true"),
        (Gemma3TextConfig(**GEMMA), None),
        (XLNetConfig(vocab_size=60, d_model=16, n_layer=2, n_head=2, d_inner=24), "model_type 'xlnet'"),
        (GPTNeoXConfig(**SIZES), None),  # its is_decoder is false, too
        (LlamaConfig(**SIZES), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else str(value),
)
def test_which_models_are_causal(config: PretrainedConfig, said: str | None) -> None:
    assert is_causal(config) == (said is None)
    named = ModelConfig(model_name_or_path="folder")
    if said is None:
        assert on_meta(named, config).device.type == "meta"
        return
    with pytest.raises(UserError, match=f"^folder/config.json: {said}: .*expected a causal language model"):
        on_meta(named, config)


def test_what_transformers_cannot_build_is_a_mistake_in_the_file() -> None:
    with pytest.raises(UserError, match=r"^folder/config.json: .* of type 'llama' .*KeyError: 'nope'"):
        on_meta(ModelConfig(model_name_or_path="folder"), LlamaConfig(**SIZES, hidden_act="nope"))
