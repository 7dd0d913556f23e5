"""Models of random weights for `benchmarks.convert`: Hugging Face directories with the right tensors and no meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.tasks.checkpoint.arguments import from_hf_config
from mindspeed_llm.tasks.checkpoint.families import of_config
from mindspeed_llm.tasks.checkpoint.layout import Topology
from mindspeed_llm.tasks.checkpoint.model import bind
from mindspeed_llm.tasks.checkpoint.safetensors_file import header

# The sizes of Qwen3-0.6B: 1.19 GB in bf16.
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
# 16 experts a layer: 0.84 GB in bf16.
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "vocab_size": 512,
}
"""Changes that make either of them a toy."""


def shapes(config: dict[str, Any]) -> dict[str, torch.Size]:
    """The tensors of a model of this configuration."""
    family = of_config(config, "config.json")
    model = bind(family, from_hf_config(family, config, "config.json"), Topology())
    return {name: torch.Size(tensor.shape) for name, tensor in model.hf_tensors().items()}


def make(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Write a model of this configuration as one safetensors file."""
    tensors = {name: (torch.bfloat16, shape) for name, shape in shapes(config).items()}
    start, offsets, _ = header(tensors)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(start)
        for name in sorted(tensors, key=offsets.__getitem__):
            dtype, shape = tensors[name]
            file.seek(offsets[name])
            file.write(torch.randn(shape, generator=generator).to(dtype).view(torch.int16).numpy().data)
    return folder
