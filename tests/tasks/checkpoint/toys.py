"""Toy checkpoints that anyone can rebuild: values follow from names, so that any wrong place shows.

value[i] = (((crc32(name) + i * 2654435761) mod 2^32) mod 4093) / 4093 - 0.5
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mindspeed_llm.tasks.checkpoint.arguments import from_hf_config
from mindspeed_llm.tasks.checkpoint.command_line import parse
from mindspeed_llm.tasks.checkpoint.convert import convert
from mindspeed_llm.tasks.checkpoint.families import of_config
from mindspeed_llm.tasks.checkpoint.hf_reader import open_hf
from mindspeed_llm.tasks.checkpoint.layout import Topology
from mindspeed_llm.tasks.checkpoint.model import bind
from mindspeed_llm.tasks.checkpoint.prepare import Conversion
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.tasks.checkpoint.torch_file import read_torch_file

REFERENCE = (
    Path(os.environ.get("MINDSPEED_SHARED", Path(__file__).resolve().parents[4] / "shared"))
    / "data"
    / "reference"
    / "mcore_layout"
)
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def tensor(name: str, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """The tensor of this name by the rule above."""
    count = int(np.prod(shape))
    u = (np.uint64(zlib.crc32(name.encode())) + np.arange(count, dtype=np.uint64) * np.uint64(2654435761)) % np.uint64(
        2**32
    )
    if dtype == "I64":
        return torch.from_numpy((u % np.uint64(8)).astype(np.int64)).reshape(shape)
    values = torch.from_numpy(((u % np.uint64(4093)).astype(np.float64) / 4093 - 0.5).astype(np.float32))
    return values.reshape(shape).to(torch.bfloat16 if dtype == "BF16" else torch.float32)


def reference(family: str) -> dict[str, Any]:
    """The reference file of a family."""
    return json.loads((REFERENCE / f"{family}.json").read_text())


def weights(spec: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The toy's tensors."""

    def dtype(name: str) -> str:
        return max((len(p), d) for p, d in spec["hf_dtype"].items() if fnmatchcase(name, p))[1]

    return {name: tensor(name, shape, dtype(name)) for name, shape in spec["hf_tensors"].items()}


_SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": _SIZES
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 88,
    },
    "qwen25": _SIZES
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 88,
    },
    "qwen3-moe": _SIZES
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 88,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "tie_word_embeddings": False,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 4,
    },
    "deepseek3": _SIZES
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": 88,
        "q_lora_rank": 20,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
}
"""Small models, for what is not about a family; the reference files have more."""


def toy(folder: Path, family: str, **changes: Any) -> Path:
    """A Hugging Face directory of one of the small models, changed in some keys; see `toy_of`."""
    return toy_of(folder, CONFIGS[family] | changes)


def toy_of(folder: Path, config: Mapping[str, Any]) -> Path:
    """A Hugging Face directory with the tensors that the family's table says, bf16."""
    found = of_config(config, "config.json")
    settings = from_hf_config(found, config, "config.json")
    topology = Topology(mtp_num_layers=settings.get("num_nextn_predict_layers") or 0)
    model = bind(found, settings, topology)
    tensors = {name: tensor(name, each.shape, "BF16") for name, each in model.hf_tensors().items()}
    for name, of in model.copies.items():
        if name in tensors:
            tensors[name] = tensors[of].clone()
    return save_hf(folder, config, tensors)


def read_hf(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory."""
    return {name: stored.view() for name, stored in open_hf(folder).items()}


def save_hf(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write a Hugging Face directory of one weight file."""
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(load: Path, save: Path, *flags: str, to: str = "mg", of: str = "hf") -> Conversion:
    """One conversion, as the command line would start it."""
    return convert(request(load, save, *flags, to=to, of=of))


def request(load: Path, save: Path, *flags: str, to: str = "mg", of: str = "hf") -> ConversionRequest:
    """What the command line with these flags asks for."""
    directions = ("--load-model-type", of, "--save-model-type", to)
    return parse([*directions, "--load-dir", str(load), "--save-dir", str(save), *flags])


def read_mg(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """All rank files of a Megatron checkpoint: path -> key -> tensor, keys as the reference files give them."""
    found = {}
    for path in sorted(folder.glob("*/mp_rank_*/*.pt")):
        content = read_torch_file(path)
        chunks = [key for key in content if key.startswith("model")]
        tensors = {}
        for chunk in chunks:
            prefix = "" if chunk == "model" else f"{chunk}/"
            if prefix and not content[chunk]:
                tensors[prefix] = None
            tensors |= {prefix + key: stored.view() for key, stored in content[chunk].items()}
        found[str(path.relative_to(folder))] = tensors
    return found


def summary(value: torch.Tensor | None) -> list:
    """Shape, dtype and hash, as the reference files give them."""
    if value is None:
        return []
    content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [list(value.shape), NAMES[value.dtype], hashlib.sha256(content).hexdigest()[:16]]
