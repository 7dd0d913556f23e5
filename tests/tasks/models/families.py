"""Toys of every family that the Megatron backend has, and what transformers computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama"},
    "llama3": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5},
    },
    "llama-yarn": {"model_type": "llama", "rope_parameters": _YARN},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen25": {"model_type": "qwen2", "head_dim": None, "num_attention_heads": 6, "hidden_size": 48},
    "qwen25-tied-windows": {
        "model_type": "qwen2",
        "head_dim": None,
        "tie_word_embeddings": True,
        "max_window_layers": 2,
        **_WINDOW,
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen3-moe": {"model_type": "qwen3_moe", **_EXPERTS, "norm_topk_prob": True},
    "qwen3-moe-steps": {"model_type": "qwen3_moe", **_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2},
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "head_dim": None,
        **_EXPERTS,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [1],
        "max_window_layers": 3,
        **_WINDOW,
    },
}
"""Toy -> what its configuration has beyond the toy `odd` of the parity tests (4 layers)."""
DENSE = tuple(name for name in FAMILIES if "moe" not in name and name != "mixtral")
EXPERTS = tuple(name for name in FAMILIES if name not in DENSE)


def build(name: str) -> PreTrainedModel:
    """The toy in fp32, with attention computed step by step."""
    fields = dict(FAMILIES[name])
    if fields.get("head_dim", 0) is None:
        # These classes have no key for it.
        fields["head_dim"] = 8
    # transformers would leave out the gradient of the embedding of a padding token.
    model = build_toy("llama", **{"pad_token_id": None, **fields})
    model.set_attn_implementation("eager")
    return model


def save(name: str, folder: Path) -> Path:
    """Write the toy as a Hugging Face directory, and beside it (`reference.pt`, `gradients`) what it computes."""
    model = build(name)
    model.save_pretrained(folder)
    ids = token_ids()
    outputs = model(ids)
    losses = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels_of(ids).flatten())
    losses.backward()
    torch.save({"ids": ids, "logits": outputs.logits.detach(), "loss": losses.detach()}, folder / "reference.pt")
    with torch.no_grad():
        for parameter in model.parameters():
            # An expert that no token chose has no gradient.
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder / "gradients")
    return folder


def token_ids() -> torch.Tensor:
    """The samples [4, 32] that models are compared on, with the first and the last token of the vocabulary."""
    ids = torch.randint(0, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(7))
    ids[0, 3], ids[1, 5] = 0, VOCABULARY - 1
    return ids


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    """Any token as a target will do: the ones after next, the last of the vocabulary among them."""
    return ids.roll(-2, dims=1)
