"""Groups of settings that many families share, with the spelling of each in config.json.

A default is what transformers takes where config.json leaves the key out, so that both read the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_llm.tasks.checkpoint.fields import (
    Choice,
    Config,
    Field,
    Only,
    RopeScaling,
    Settings,
    Spec,
    Written,
    nested,
)

# Sizes of the whole model

SIZES: tuple[Spec, ...] = (
    Field(mg="num_layers", hf=("num_hidden_layers",), required=True),
    Field(mg="hidden_size", hf=("hidden_size",), required=True),
    Field(mg="vocab_size", hf=("vocab_size",), required=True),
    Field(mg="max_position_embeddings", hf=("max_position_embeddings",)),
    Field(
        mg="untie_embeddings_and_output_weights",
        hf=("tie_word_embeddings",),
        negated=True,
        default=True,
    ),
    Field(mg="init_method_std", hf=("initializer_range",), default=0.02),
    *(Field(mg=name, hf=(name,)) for name in ("bos_token_id", "eos_token_id", "pad_token_id")),
)
TIED = Field(mg="untie_embeddings_and_output_weights", hf=("tie_word_embeddings",), negated=True, default=False)
"""Of families whose embedding is the output layer unless config.json says otherwise."""


def norm(epsilon: float = 1e-6) -> tuple[Spec, ...]:
    """Root mean square norms."""
    return (
        Field(mg="normalization", default="RMSNorm"),
        Field(mg="norm_epsilon", hf=("rms_norm_eps",), default=epsilon),
    )


# Activations: of gated MLPs unless said otherwise.
ACTIVATION = Choice(
    hf=("hidden_act",),
    options={
        "silu": {"swiglu": True},
        "gelu": {"geglu": True},
        "gelu_pytorch_tanh": {"geglu": True, "gelu_tanh": True},
    },
    default="silu",
)

# Attention


def of_rope_parameters(key: str) -> Callable[[Config], Any]:
    """A key of the object that transformers 5 writes; of full attention, where there is one for each kind of layer."""

    def read(config: Config) -> Any:
        value = nested(config, f"rope_parameters.{key}")
        return nested(config, f"rope_parameters.full_attention.{key}") if value is None else value

    return read


def rotary(base: float = 10000.0, *, part: float = 1.0) -> tuple[Spec, ...]:
    """Rotary positions: their base, the part of a head that turns, and how they are stretched."""
    return (
        Field(mg="position_embedding_type", default="rope"),
        Field(mg="rotary_base", hf=(of_rope_parameters("rope_theta"), "rope_theta"), default=base),
        Field(
            mg="partial_rotary_factor",
            hf=(of_rope_parameters("partial_rotary_factor"), "partial_rotary_factor"),
            default=part,
            also=("rotary_percent",),
            quiet=True,
        ),
        RopeScaling(),
    )


ROTARY = rotary()


def heads(head_dim: int | None = None) -> tuple[Spec, ...]:
    """Heads of grouped-query attention; without a number of KV heads, each query head has its own."""
    return (
        Field(mg="num_attention_heads", hf=("num_attention_heads",), required=True),
        Field(mg="num_query_groups", hf=("num_key_value_heads",), default=lambda s: s["num_attention_heads"]),
        Field(
            mg="kv_channels",
            hf=("head_dim",),
            default=head_dim or (lambda s: s["hidden_size"] // s["num_attention_heads"]),
        ),
    )


ATTENTION_BIAS = (
    Field(mg="add_qkv_bias", hf=("attention_bias",), default=False),
    Field(mg="add_dense_bias", hf=("attention_bias",), default=False, written=False),
)
"""One key for the biases of query, key, value, and of the projection behind attention."""
QKV_BIAS = Field(mg="add_qkv_bias", hf=("attention_bias",), default=False)
MLP_BIAS = Field(mg="add_mlp_bias", hf=("mlp_bias",), default=False)


def sliding_window(default: int | None = None) -> Field:
    """The number of positions that a query sees, itself included; None: all."""
    return Field(mg="sliding_window", hf=("sliding_window",), default=default, nullable=True)


OPTIONAL_WINDOW = (
    sliding_window(4096),
    Field(mg="use_sliding_window", hf=("use_sliding_window",), default=False),
    Field(mg="max_window_layers", hf=("max_window_layers",)),
)


def _window_layers(sees_window: Callable[[int, int], bool], expected: str) -> Only:
    """A list of kinds that says no more than `OPTIONAL_WINDOW` does, from which transformers derives it by
    `sees_window(layer, max_window_layers)`.
    """

    def holds(kinds: Any, settings: Settings) -> bool:
        window = settings["sliding_window"] if settings["use_sliding_window"] else None
        most = 28 if settings["max_window_layers"] is None else settings["max_window_layers"]
        return isinstance(kinds, list) and all(
            kind == ("sliding_attention" if window is not None and sees_window(layer, most) else "full_attention")
            for layer, kind in enumerate(kinds)
        )

    return Only(hf="layer_types", holds=holds, expected=expected)


WINDOW_LAYERS = _window_layers(
    lambda layer, most: layer >= most,
    "full_attention in the first max_window_layers, and with use_sliding_window sliding_attention behind them",
)
"""Of classes that read it: a window in other layers than `OPTIONAL_WINDOW` says is refused."""
ALTERNATING_WINDOW_LAYERS = _window_layers(
    lambda layer, most: layer < most and layer % 2 == 0,
    "with use_sliding_window sliding_attention in each other one of the first max_window_layers, beginning with the "
    "first, and full_attention elsewhere",
)
"""The same of Qwen2-MoE, whose rule is another one."""


def windows(every: int) -> Field:
    """Which layers see a sliding window only: 1, or 0 for each layer; by default all but each `every`-th."""

    def by_pattern(config: Config) -> list[str] | None:
        pattern = config.get("sliding_window_pattern")
        kinds = ("full_attention", "sliding_attention")
        return pattern and [kinds[bool((layer + 1) % pattern)] for layer in range(config["num_hidden_layers"])]

    return Field(
        mg="window_attn_skip_freq",
        hf=("layer_types", by_pattern),
        values={"sliding_attention": 1, "full_attention": 0},
        default=lambda s: [int((layer + 1) % every != 0) for layer in range(s["num_layers"])],
        per_layer=True,
    )


MLP = Field(mg="ffn_hidden_size", hf=("intermediate_size",), required=True)
DENSE: tuple[Spec, ...] = (*SIZES, *norm(), *ROTARY, *heads(), MLP, ACTIVATION)
"""A plain decoder without any bias."""

LATENT: tuple[Spec, ...] = (
    Field(mg="num_attention_heads", hf=("num_attention_heads",), required=True),
    Field(mg="q_lora_rank", hf=("q_lora_rank",), nullable=True),
    Field(mg="kv_lora_rank", hf=("kv_lora_rank",), required=True),
    Field(mg="qk_head_dim", hf=("qk_nope_head_dim",), required=True),
    Field(mg="qk_pos_emb_head_dim", hf=("qk_rope_head_dim",), required=True),
    Field(mg="v_head_dim", hf=("v_head_dim",), required=True),
    # transformers wants it although each head has keys of its own.
    Written(hf="num_key_value_heads", value=lambda s: s["num_attention_heads"]),
)
"""Multi-head latent attention."""
INDEXER: tuple[Spec, ...] = (
    Field(mg="enable_dsa_indexer", default=True),
    Field(mg="index_n_heads", hf=("index_n_heads",), required=True),
    Field(mg="index_head_dim", hf=("index_head_dim",), required=True),
    Field(mg="index_topk", hf=("index_topk",), default=2048),
)
"""The sparse indexer of DeepSeek-V3.2."""

# Experts


def moe(num_experts: str, ffn: str = "moe_intermediate_size", *, top_k: str = "num_experts_per_tok") -> tuple:
    """Experts, by the keys that a config.json uses for their number and their width."""
    # transformers 5 writes the number under a name of its own.
    return (
        Field(mg="num_experts", hf=(num_experts, "num_local_experts"), required=True),
        Field(mg="moe_ffn_hidden_size", hf=(ffn,), required=True, also=("moe_intermediate_size",)),
        Field(mg="moe_router_topk", hf=(top_k,)),
    )


def softmax_router(normalised: bool | None = None) -> tuple[Spec, ...]:
    """Experts are chosen by softmax; `normalised` is for families whose config.json does not say whether the weights
    of those that are chosen sum to one.
    """
    key = () if normalised is not None else ("norm_topk_prob",)
    return (
        Field(mg="moe_router_score_function", default="softmax"),
        Field(mg="norm_topk_prob", hf=key, default=bool(normalised)),
        # Softmax over the chosen ones alone is the same as over all and then normalised.
        Field(mg="moe_router_pre_softmax", default=lambda s: not s["norm_topk_prob"]),
        Field(mg="moe_aux_loss_coeff", hf=("router_aux_loss_coef",)),
    )


def sigmoid_router(*, scale: str = "routed_scaling_factor", scale_default: float = 1.0) -> tuple[Spec, ...]:
    """Experts are chosen by sigmoid and a bias that balances their load; their weights are normalised and scaled."""
    return (
        Field(mg="moe_router_score_function", hf=("scoring_func", "score_function"), default="sigmoid"),
        Field(mg="moe_router_enable_expert_bias", default=True),
        Field(mg="norm_topk_prob", hf=("norm_topk_prob",), default=True),
        Field(mg="moe_router_topk_scaling_factor", hf=(scale,), default=scale_default),
    )


GROUPS = (
    Field(mg="moe_router_num_groups", hf=("n_group",)),
    Field(mg="moe_router_group_topk", hf=("topk_group",)),
)
"""Experts are chosen among those of the best groups."""


def first_dense(default: int = 0) -> tuple[Spec, ...]:
    """Layers at the start without experts."""
    return (
        Field(mg="first_k_dense_replace", hf=("first_k_dense_replace", _leading_dense), default=default),
        # A number, or as Megatron has it a list; no class reads it, the number of dense layers says it all.
        Field(mg="moe_layer_freq", hf=("moe_layer_freq",), default=1, written=False, per_layer=True),
    )


def _leading_dense(config: Config) -> int | None:
    """The number of dense layers at the start, by the kinds of all layers."""
    kinds, frequency = config.get("mlp_layer_types"), config.get("moe_layer_freq")
    if kinds is None and isinstance(frequency, list):
        kinds = ["sparse" if sparse else "dense" for sparse in frequency]
    if kinds is None:
        return None
    count = next((layer for layer, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    if "dense" in kinds[count:]:
        raise ValueError("mlp_layer_types has a dense layer behind a sparse one; expected dense ones at the start only")
    return count


MLP_LAYER_TYPES = Written(hf="mlp_layer_types", value=lambda s: _layer_types(s))
"""For classes that read this alone."""


def _layer_types(settings: Settings) -> list[str]:
    dense = settings["first_k_dense_replace"]
    return ["dense" if layer < dense else "sparse" for layer in range(settings["num_layers"])]


MTP_LAYERS = Field(mg="num_nextn_predict_layers", hf=("num_nextn_predict_layers",), default=0)
SPARSE_STEP = (
    Field(mg="decoder_sparse_step", hf=("decoder_sparse_step",), default=1),
    Field(mg="mlp_only_layers", hf=("mlp_only_layers",), default=lambda _: []),
)


def shared_by_count(key: str = "n_shared_experts") -> tuple[Spec, ...]:
    """Shared experts, of the width of the others each."""
    return (
        Field(mg="n_shared_experts", hf=(key,), default=0),
        Field(
            mg="moe_shared_expert_intermediate_size",
            default=lambda s: (s["n_shared_experts"] or 0) * s["moe_ffn_hidden_size"],
        ),
    )


SHARED_BY_SIZE = Field(mg="moe_shared_expert_intermediate_size", hf=("shared_expert_intermediate_size",), required=True)
