"""Which toy models there are, one or more of each family, and how tests split them.

Configurations differ from the defaults of their class wherever a number depends on it, so that a setting that a
conversion forgets shows in the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.tasks.checkpoint.golden import latent, mixtures

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 509,
    "intermediate_size": 88,
    "max_position_embeddings": 128,
    "rms_norm_eps": 3e-5,
    "initializer_range": 0.03,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = _SIZES | {"head_dim": 16}
_LATENT = _SIZES | {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_ROUTED = _EXPERTS | {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
_INDEXER: dict[str, Any] = {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 16}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.8,
    "mscale_all_dim": 0.7,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 20000.0}
TP2, PP2, EP2 = (f"--target-{kind}-parallel-size 2" for kind in ("tensor", "pipeline", "expert"))
VPP, LIST = "--num-layers-per-virtual-pipeline-stage 1", "--num-layer-list 1,3"
GROUPED, TE, MM = "--moe-grouped-gemm", "--transformer-impl transformer_engine", "--mla-mm-split"
ETP1, EXTEND, DUAL = "--expert-tensor-parallel-size 1", "--moe-tp-extend-ep", "--schedules-method dualpipev"


@dataclass(frozen=True, kw_only=True)
class Toy:
    """One toy model and two ways to split it."""

    family: str
    """The id of its family."""
    config: Mapping[str, Any]
    split: tuple[str, str]
    """Flags of two conversions."""
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensors that checkpoints have and the class of transformers does not: name -> shape."""
    left_out: str = "$^"
    """Tensors that the class has and checkpoints do not, as a pattern."""


def toy(model_type: str, family: str, config: Mapping[str, Any], *split: str, **other: Any) -> Toy:
    """Short for `Toy`."""
    first, second = split
    return Toy(family=family, config={"model_type": model_type, **config}, split=(first, second), **other)


TOYS = {
    "llama": toy("llama", "llama2", _SIZES | {"rope_parameters": _LLAMA3}, TP2, f"{PP2} {VPP}"),
    "llama-biases": toy(
        "llama",
        "llama2",
        _WIDE | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "tie_word_embeddings": True},
        f"{TP2} {PP2}",
        f"{TE} {TP2}",
    ),
    "mistral": toy("mistral", "mistral", _WIDE | {"sliding_window": 8}, f"{TP2} {PP2}", f"{TE} {PP2} {LIST}"),
    "mixtral": toy(
        "mixtral",
        "mixtral",
        _SIZES | {"num_local_experts": 8, "sliding_window": 8},
        f"{TP2} {EP2} {GROUPED}",
        f"{PP2} {VPP} {EP2}",
    ),
    "qwen2": toy(
        "qwen2",
        "qwen25",
        _SIZES | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        f"{TP2} {PP2}",
        f"{PP2} {DUAL}",
    ),
    "qwen3": toy("qwen3", "qwen3", _WIDE | {"attention_bias": True}, TP2, f"{PP2} {LIST}"),
    "qwen2-moe": toy(
        "qwen2_moe",
        "qwen2-moe",
        _SIZES
        | _EXPERTS
        | {"num_experts": 8, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        f"{TP2} {EP2}",
        f"{PP2} {EP2} {GROUPED}",
    ),
    "qwen3-moe": toy(
        "qwen3_moe",
        "qwen3-moe",
        _WIDE | _EXPERTS | {"num_experts": 8, "norm_topk_prob": True},
        f"{TP2} {EP2} {ETP1}",
        f"{PP2} {EP2} {GROUPED} {TE}",
    ),
    "qwen3-next": toy(
        "qwen3_next",
        "qwen3-next",
        _WIDE
        | _EXPERTS
        | {
            "num_experts": 8,
            "shared_expert_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 12,
        },
        f"{PP2} {EP2}",
        f"{PP2} {VPP} {GROUPED}",
    ),
    "deepseek2": toy(
        "deepseek_v2",
        "deepseek2-lite",
        _LATENT | _ROUTED | {"topk_method": "group_limited_greedy", "rope_parameters": _YARN},
        f"{TP2} {PP2} {EP2}",
        f"{TP2} {EP2} {GROUPED} {MM}",
    ),
    "deepseek2-lite": toy(
        "deepseek_v2",
        "deepseek2-lite",
        _LATENT | _ROUTED | {"q_lora_rank": None},
        f"{TP2} {EP2} {GROUPED} {EXTEND}",
        f"{PP2} {EP2} {TE}",
    ),
    "deepseek3": toy(
        "deepseek_v3",
        "deepseek3",
        _LATENT | _ROUTED | {"rope_parameters": _YARN, "num_nextn_predict_layers": 0},
        f"{TP2} {PP2} {EP2} {MM}",
        f"{PP2} {VPP} {EP2} {GROUPED}",
    ),
    "deepseek32": toy(
        "deepseek_v32",
        "deepseek32",
        _LATENT | _ROUTED | _INDEXER | {"num_nextn_predict_layers": 1},
        f"{TP2} {PP2} {EP2} {MM} {GROUPED} --mtp-num-layers 1",
        f"{PP2} {DUAL} --mtp-num-layers 1",
        more=latent.DEEPSEEK32_MTP,
    ),
    "glm5": toy(
        "glm_moe_dsa",
        "glm5",
        _LATENT
        | _ROUTED
        | _INDEXER
        | {"indexer_types": ["full", "shared", "full", "shared"], "num_nextn_predict_layers": 1},
        f"{TP2} {PP2} {EP2} {GROUPED} --mtp-num-layers 1",
        f"{PP2} {VPP} {EP2} {MM} --mtp-num-layers 1",
        more=latent.GLM5_MTP,
    ),
    "glm4": toy("glm4", "glm4", _WIDE, f"{TP2} {PP2}", f"{TE} {PP2} {VPP}"),
    "glm45": toy(
        "glm4_moe",
        "glm45-air",
        _WIDE | _ROUTED | {"use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0},
        f"{TP2} {PP2} {EP2}",
        f"{TP2} {EP2} {GROUPED} {TE}",
    ),
    "phi3": toy(
        "phi3",
        "phi3.5",
        _SIZES
        | {
            "rope_parameters": _LONGROPE
            | {"short_factor": [1.1, 1.2], "long_factor": [2.0, 3.0], "partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 64,
            "sliding_window": 8,
        },
        f"{TP2} {PP2}",
        f"{PP2} {LIST} {TE}",
    ),
    "phi3.5-moe": toy(
        "phimoe",
        "phi3.5-moe",
        _SIZES
        | {
            "num_local_experts": 8,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": _LONGROPE
            | {
                "short_factor": [1.1] * 4,
                "long_factor": [2.0] * 4,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 64,
            },
        },
        f"{TP2} {PP2} {EP2}",
        f"{TP2} {EP2} {GROUPED} {TE}",
    ),
    "gemma2": toy(
        "gemma2",
        "gemma2",
        _WIDE
        | {
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": None,
        },
        f"{TP2} {PP2}",
        f"{TE} {PP2} {VPP}",
    ),
    "gemma3": toy(
        "gemma3_text",
        "gemma3",
        _WIDE
        | {
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
        f"{TP2} {PP2}",
        f"{PP2} {DUAL} {TE}",
    ),
    "internlm3": toy(
        "internlm3",
        "internlm3",
        _WIDE
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 500000.0},
        },
        f"{TP2} {PP2}",
        f"{PP2} {VPP}",
    ),
    "seed-oss": toy(
        "seed_oss", "seed-oss", _WIDE | {"attention_out_bias": True, "mlp_bias": True}, f"{TP2} {PP2}", f"{TE} {TP2}"
    ),
    "gpt-oss": toy(
        "gpt_oss",
        "gpt-oss",
        _WIDE
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "swiglu_limit": 1.5,
            "swiglu_alpha": 1.5,
        },
        f"{TP2} {PP2} {EP2}",
        f"{TP2} {EP2} {GROUPED} {TE}",
    ),
    "minimax_m2": toy(
        "minimax_m2",
        "minimax_m2",
        _WIDE | {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
        f"{PP2} {EP2}",
        f"{PP2} {VPP} {GROUPED}",
    ),
    "HYV3": toy(
        "hy_v3",
        "HYV3",
        _WIDE
        | _EXPERTS
        | {
            "num_experts": 8,
            "num_shared_experts": 1,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "router_scaling_factor": 1.9,
            "num_nextn_predict_layers": 1,
        },
        f"{TP2} {PP2} {EP2} {GROUPED} --mtp-num-layers 1",
        f"{PP2} {VPP} {EP2} --mtp-num-layers 1",
        more=mixtures.HYV3_MTP,
    ),
    "longcat": toy(
        "longcat_flash",
        "longcat",
        {key: value for key, value in _LATENT.items() if key not in ("num_hidden_layers", "intermediate_size")}
        | {
            "num_layers": 4,
            "head_dim": 4,
            "ffn_hidden_size": 88,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
            "moe_topk": 3,
            "routed_scaling_factor": 2.0,
        },
        f"{TP2} {PP2} {EP2}",
        f"{TP2} {EP2} {ETP1} {GROUPED} {MM}",
        left_out=r"experts\.(8|9|10|11)\.",
    ),
    "mamba2": toy(
        "mamba2",
        "mamba2",
        {
            "hidden_size": 48,
            "num_hidden_layers": 4,
            "vocab_size": 509,
            "head_dim": 8,
            "num_heads": 12,
            "state_size": 16,
            "n_groups": 4,
            "chunk_size": 32,
            "layer_norm_epsilon": 3e-5,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        f"{TP2} {PP2}",
        f"{PP2} {VPP}",
    ),
}
"""Those that transformers has a class for."""
OTHERS = {
    "bailing_mini": Toy(
        family="bailing_mini",
        config={"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe"}
        | _WIDE
        | _EXPERTS
        | {
            "num_experts": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
        },
        split=(f"{TP2} {PP2} {EP2} {GROUPED} --mtp-num-layers 1", f"{PP2} {VPP} {EP2} --mtp-num-layers 1"),
        more=mixtures.BAILING_TENSORS,
    ),
    "plm": Toy(
        family="plm",
        config={"architectures": ["PLMForCausalLM"], "model_type": "plm", "hidden_act": "relu2"}
        | {key: value for key, value in _LATENT.items() if key != "q_lora_rank"}
        | {"tie_word_embeddings": True},
        split=(f"{TP2} {PP2}", f"{PP2} {VPP} {MM}"),
        more=latent.PLM_TENSORS,
    ),
}
"""Those without: all tensors by hand."""
