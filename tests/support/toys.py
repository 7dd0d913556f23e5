"""Toy models that parity is measured on: small, odd in every size, and with weights that are neither ones nor zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 509

_ODD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
TOYS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_ODD},
    "llama_tied": {"model_type": "llama", **_ODD, "tie_word_embeddings": True},
    "llama_uneven": {
        "model_type": "llama",
        **_ODD,
        "vocab_size": 13,
        "hidden_size": 9,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "intermediate_size": 11,
    },
    "llama_odd3": {
        "model_type": "llama",
        **_ODD,
        "hidden_size": 54,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "qwen3": {"model_type": "qwen3", **_ODD},
    "qwen3_moe": {"model_type": "qwen3_moe", **_ODD, **_MOE},
    "mixtral": {"model_type": "mixtral", **_ODD, "num_local_experts": 6, "num_experts_per_tok": 2},
    "gemma": {"model_type": "gemma", **_ODD, "tie_word_embeddings": True},
    "gemma3_text": {
        "model_type": "gemma3_text",
        **_ODD,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
    },
}


def build_toy(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The toy `name` in fp32 with random weights (standard deviation 0.2; norm weights and biases random as well)."""
    fields = {**TOYS[name], **overrides}
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    config.use_cache = False
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    # Gemma's norms multiply by 1 + weight: around 1 they would double every layer's output and make training chaotic.
    centre = 0.0 if config.model_type.startswith("gemma") else 1.0
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else centre + 0.3 * noise)
    return model.eval()


def save_toy(name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype | None = None, **options: Any) -> Path:
    """Write the toy as a Hugging Face directory with transformers' own `save_pretrained`; `options` go there."""
    model = build_toy(name, seed=seed)
    if dtype is not None:
        model = model.to(dtype)
        model.config.dtype = dtype
    model.save_pretrained(folder, **options)
    return folder
