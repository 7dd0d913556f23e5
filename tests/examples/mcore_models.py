"""The models of the Megatron pre-training examples: published configurations, and the toys that stand for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.support.tokenizers import byte_tokenizer
from tests.support.toys import VOCABULARY, build_toy


@dataclass(frozen=True, kw_only=True)
class Toy:
    """How a script is run at toy size."""

    name: str
    """Of tests.support.toys."""
    ranks: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    flags: str = ""
    """Beside the sizes of the toy."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A script, and what is published about its model."""

    ranks: int
    parameters: int
    """Of the published weights; a tied output layer is not counted twice."""
    config: dict[str, Any]
    """Fields of the published config.json."""
    toy: Toy


_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
}


def _config(model_type: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any) -> Any:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return {"model_type": model_type, **sizes, **more}


def _qwen3_moe(layers: int, hidden: int, ffn: int, heads: int, expert_ffn: int) -> Any:
    experts = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_ffn,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    }
    return _config("qwen3_moe", layers, hidden, ffn, heads, 4, **_QWEN3, **experts)


def _llama3(layers: int, hidden: int, ffn: int, heads: int) -> Any:
    return _config(
        "llama",
        layers,
        hidden,
        ffn,
        heads,
        8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )


_MIXTRAL = _config(
    "mixtral",
    32,
    4096,
    14336,
    32,
    8,
    vocab_size=32000,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=False,
    sliding_window=None,
    num_local_experts=8,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.02,
)
_TIED = {**_QWEN3, "tie_word_embeddings": True}

EXAMPLES: dict[str, Example] = {
    "qwen3/pretrain_qwen3_0point6b_4K_ptd": Example(
        ranks=8,
        parameters=596_049_920,
        config=_config("qwen3", 28, 1024, 3072, 16, 8, **_TIED),
        toy=Toy(name="qwen3_tied", ranks=1),
    ),
    "qwen3/pretrain_qwen3_1point7b_4K_ptd": Example(
        ranks=8,
        parameters=1_720_574_976,
        config=_config("qwen3", 28, 2048, 6144, 16, 8, **_TIED),
        toy=Toy(name="qwen3_tied"),
    ),
    "qwen3/pretrain_qwen3_8b_4K_ptd": Example(
        ranks=8,
        parameters=8_190_735_360,
        config=_config("qwen3", 36, 4096, 12288, 32, 8, **_QWEN3),
        toy=Toy(name="qwen3"),
    ),
    "qwen3/pretrain_qwen3_14b_4K_ptd": Example(
        ranks=8,
        parameters=14_768_307_200,
        config=_config("qwen3", 40, 5120, 17408, 40, 8, **_QWEN3),
        toy=Toy(name="qwen3", environment={"TP": "2", "PP": "1"}),
    ),
    "qwen3/pretrain_qwen3_32b_4K_ptd": Example(
        ranks=16,
        parameters=32_762_123_264,
        config=_config("qwen3", 64, 5120, 25600, 64, 8, **_QWEN3),
        toy=Toy(name="qwen3", environment={"TP": "2", "PP": "1", "NNODES": "1"}),
    ),
    "qwen3_moe/pretrain_qwen3_30b_a3b_4K_ptd": Example(
        ranks=16,
        parameters=30_532_122_624,
        config=_qwen3_moe(48, 2048, 6144, 32, 768),
        toy=Toy(name="qwen3_moe", environment={"PP": "1", "EP": "2", "NNODES": "1"}),
    ),
    "qwen3_moe/pretrain_qwen3_235b_a22b_4k_A3_ptd": Example(
        ranks=256,
        parameters=235_093_634_560,
        config=_qwen3_moe(94, 4096, 12288, 64, 1536),
        toy=Toy(
            name="qwen3_moe",
            environment={"PP": "2", "EP": "1", "VPP": "1", "NOOP_LAYERS": "4,5", "NNODES": "1"},
            flags="--num-layers 6",
        ),
    ),
    "llama3/pretrain_llama3_8b_ptd": Example(
        ranks=8,
        parameters=8_030_261_248,
        config=_llama3(32, 4096, 14336, 32),
        toy=Toy(name="llama", environment={"TP": "2", "PP": "1"}),
    ),
    "llama3/pretrain_llama3_70b_ptd": Example(
        ranks=64,
        parameters=70_553_706_496,
        config=_llama3(80, 8192, 28672, 64),
        toy=Toy(name="llama", ranks=4, environment={"TP": "2", "PP": "2", "VPP": "1", "NNODES": "1"}),
    ),
    "mixtral/pretrain_mixtral_8x7b_ptd": Example(
        ranks=16,
        parameters=46_702_792_704,
        config=_MIXTRAL,
        toy=Toy(name="mixtral", environment={"PP": "1", "EP": "2", "NNODES": "1"}),
    ),
}
"""Pre-training script below examples/mcore -> what it is for."""

_QWEN25_7B = Example(
    ranks=8,
    parameters=7_615_616_512,
    config=_config(
        "qwen2",
        28,
        3584,
        18944,
        28,
        4,
        vocab_size=152064,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    ),
    toy=Toy(name="llama"),
)
_QWEN3_30B = "qwen3_moe/pretrain_qwen3_30b_a3b_4K_ptd"

_LLAMA2 = Example(
    ranks=8,
    parameters=6_738_415_616,
    config=_config(
        "llama",
        32,
        4096,
        11008,
        32,
        32,
        vocab_size=32000,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    ),
    toy=Toy(name="llama", environment={"FINAL_LOCAL_LAYER": "1"}, flags="--group-query-attention"),
)

TUNING_EXAMPLES: dict[str, Example] = {
    **{
        f"qwen3/tune_qwen3_{size}_4K_{how}_ptd": EXAMPLES[f"qwen3/pretrain_qwen3_{size}_4K_ptd"]
        for size in ("8b", "0point6b", "1point7b", "14b", "32b")
        for how in ("full", "lora")
    },
    "qwen3_moe/dpo_qwen3_30b_a3b_4K_ptd": EXAMPLES[_QWEN3_30B],
    "qwen3_moe/tune_qwen3_30b_a3b_4K_full_ptd": EXAMPLES[_QWEN3_30B],
    "qwen3_moe/tune_qwen3_30b_a3b_4K_lora_ptd": EXAMPLES[_QWEN3_30B],
    "qwen3_moe/tune_qwen3_235b_a22b_4k_full_A3_ptd": replace(
        EXAMPLES["qwen3_moe/pretrain_qwen3_235b_a22b_4k_A3_ptd"],
        # Rows of different lengths and virtual stages need more than two stages.
        toy=Toy(
            name="qwen3_moe",
            ranks=4,
            environment={"PP": "4", "EP": "1", "VPP": "1", "NOOP_LAYERS": "4,5,6,7", "NNODES": "1"},
            flags="--num-layers 8",
        ),
    ),
    "qwen25/tune_qwen25_7b_4k_full_ptd": _QWEN25_7B,
    "qwen25/tune_qwen25_7b_4k_lora_ptd": _QWEN25_7B,
    "llama2/tune_llama2_7b_lu_lora_ptd": _LLAMA2,
}
"""The same for fine-tuning and preference optimisation."""

# The sizes of the toys as flags; of a flag given twice the last one counts.
TOY_FLAGS = (
    "--num-layers 4 --hidden-size 48 --ffn-hidden-size 88 --num-attention-heads 6 --num-query-groups 2 "
    "--kv-channels 16 --max-position-embeddings 256 --vocab-size 509 --padded-vocab-size 512"
)
TOY_EXPERT_FLAGS = {
    "qwen3_moe": "--num-experts 6 --moe-router-topk 2 --moe-ffn-hidden-size 40",
    "mixtral": "--num-experts 6 --moe-router-topk 2 --moe-ffn-hidden-size 88",
}
PERIOD = 16


def save_config(example: Example, folder: Path) -> Path:
    """A directory with the config.json that the published model has, as transformers writes it."""
    fields = dict(example.config)
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


def build_example_toy(example: Example) -> PreTrainedModel:
    """The toy of the script's family, with what its flags say about positions and norms."""
    same = {name: example.config[name] for name in ("model_type", "rope_parameters", "rms_norm_eps")}
    if "norm_topk_prob" in example.config:
        same["norm_topk_prob"] = example.config["norm_topk_prob"]
    name = example.toy.name
    return build_toy(name.removesuffix("_tied"), **same, tie_word_embeddings=name.endswith("_tied"))


def save_toy_directory(example: Example, folder: Path) -> Path:
    """The toy with a tokenizer of bytes."""
    build_example_toy(example).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def repeated_ids(count: int) -> Tensor:
    """Token ids of the data: one stretch over and over, so that every sample is the same however they are shuffled."""
    stretch = torch.randint(0, 250, (PERIOD,), generator=torch.Generator().manual_seed(5))
    assert stretch.unique().numel() > PERIOD // 2 and count % PERIOD == 0 and VOCABULARY > 250
    return stretch.repeat(count // PERIOD)


def expected_loss(example: Example, length: int) -> float:
    """Cross entropy of a sample by transformers, in fp32."""
    ids = repeated_ids(length + PERIOD)[: length + 1]
    with torch.no_grad():
        logits = build_example_toy(example)(ids[None, :-1]).logits[0]
    return torch.nn.functional.cross_entropy(logits.float(), ids[1:]).item()
