"""Toys of every family that the Megatron backend has, and what transformers computes with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.toys import VOCABULARY, build_toy

_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5}
# These classes have no key for the width of a head: hidden_size / num_attention_heads.
_NARROW = {"head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "llama-linear": {"model_type": "llama", "rope_parameters": _LINEAR},
    "llama-yarn": {"model_type": "llama", "rope_parameters": _YARN},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen25": {"model_type": "qwen2", **_NARROW},
    "qwen25-tied-windows": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "max_window_layers": 2,
        **_NARROW,
        **_WINDOW,
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "intermediate_size": 40,
    },
    "qwen3-moe": {"model_type": "qwen3_moe", **_EXPERTS, "norm_topk_prob": True},
    "qwen3-moe-steps": {"model_type": "qwen3_moe", **_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2},
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        **_EXPERTS,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [1],
        "max_window_layers": 3,
        **_NARROW,
        **_WINDOW,
    },
}
"""Toy -> what its configuration has beyond the toy `odd` of the parity tests (4 layers)."""
EXPERTS = tuple(
    name for name, fields in FAMILIES.items() if fields["model_type"] in ("mixtral", "qwen3_moe", "qwen2_moe")
)
DENSE = tuple(name for name in FAMILIES if name not in EXPERTS)

# The samples, and what else is learnt beside them: the model, its router logits of each layer [tokens, experts] and the
# number of samples -> a loss, per micro step.
AuxiliaryLoss = Callable[[PreTrainedModel, list[Tensor]], Tensor]


def build(name: str) -> PreTrainedModel:
    """The toy in fp32, with attention computed step by step."""
    # transformers would leave out the gradient of the embedding of a padding token.
    model = build_toy("llama", **{"pad_token_id": None, **FAMILIES[name]})
    model.set_attn_implementation("eager")
    return model


def save(name: str, folder: Path) -> Path:
    """Write the toy as a Hugging Face directory, and what it computes for the samples beside it.

    `reference.pt` has `ids` and `logits`; `gradients` is a directory like the toy's, with the gradient of the mean loss
    in place of each weight.
    """
    model = build(name)
    model.save_pretrained(folder)
    ids = token_ids()
    logits = model(ids).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_of(ids).flatten()).backward()
    torch.save({"ids": ids, "logits": logits.detach()}, folder / "reference.pt")
    save_gradients(model, folder / "gradients")
    return folder


def save_gradients(model: PreTrainedModel, folder: Path) -> None:
    """Write the model with the gradient of each weight in its place; zeros where nothing came through."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)


def token_ids() -> Tensor:
    """The samples [4, 32] that models are compared on, with the first and the last token of the vocabulary."""
    ids = torch.randint(0, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(7))
    ids[0, 3], ids[1, 5] = 0, VOCABULARY - 1
    return ids


def labels_of(ids: Tensor) -> Tensor:
    """Any token will do as a target: the one after next, the first and the last of the vocabulary among them."""
    return ids.roll(-2, dims=1)
