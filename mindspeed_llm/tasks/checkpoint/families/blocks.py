"""Groups of entries that many families share. A family's table puts them together; nothing here knows a family."""

from __future__ import annotations

from mindspeed_llm.tasks.checkpoint.rules import (
    COLUMNS,
    ROWS,
    STACKED_FC1,
    STACKED_FC2,
    WHOLE,
    GroupedQkv,
    Vocabulary,
)
from mindspeed_llm.tasks.checkpoint.tables import Copy, Dropped, Entry, Field, Hf, entry, hf

# Settings

SIZES = (
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
)
NORM = (Field(mg="norm_epsilon", hf=("rms_norm_eps",), default=1e-6),)
ROTARY = (Field(mg="rotary_base", hf=("rope_theta", "rope_parameters.rope_theta"), default=10000.0),)
HEADS = (
    Field(mg="num_attention_heads", hf=("num_attention_heads",), required=True),
    Field(mg="num_query_groups", hf=("num_key_value_heads",), default=lambda s: s["num_attention_heads"]),
    Field(mg="kv_channels", hf=("head_dim",), default=lambda s: s["hidden_size"] // s["num_attention_heads"]),
)
MLP = (Field(mg="ffn_hidden_size", hf=("intermediate_size",), required=True),)
DENSE_FIELDS = (*SIZES, *NORM, *ROTARY, *HEADS, *MLP)


def moe_fields(num_experts: str, ffn: str = "moe_intermediate_size", *, top_k: str = "num_experts_per_tok") -> tuple:
    """The settings of experts, by the keys that a config.json uses for their number and their width."""
    return (
        Field(mg="num_experts", hf=(num_experts,), required=True),
        Field(mg="moe_ffn_hidden_size", hf=(ffn,), required=True, also=("moe_intermediate_size",)),
        Field(mg="moe_router_topk", hf=(top_k,)),
    )


FIRST_DENSE = (
    Field(mg="first_k_dense_replace", hf=("first_k_dense_replace",), default=0),
    Field(mg="moe_layer_freq", hf=("moe_layer_freq",), default=1),
)
MTP_LAYERS = (Field(mg="num_nextn_predict_layers", hf=("num_nextn_predict_layers",), default=0),)
SPARSE_STEP = (
    Field(mg="decoder_sparse_step", hf=("decoder_sparse_step",), default=1),
    Field(mg="mlp_only_layers", hf=("mlp_only_layers",), default=()),
)
LATENT_FIELDS = (
    Field(mg="num_attention_heads", hf=("num_attention_heads",), required=True),
    Field(mg="q_lora_rank", hf=("q_lora_rank",)),
    Field(mg="kv_lora_rank", hf=("kv_lora_rank",), required=True),
    Field(mg="qk_head_dim", hf=("qk_nope_head_dim",), required=True),
    Field(mg="qk_pos_emb_head_dim", hf=("qk_rope_head_dim",), required=True),
    Field(mg="v_head_dim", hf=("v_head_dim",), required=True),
)
SHARED_BY_COUNT = (
    Field(mg="n_shared_experts", hf=("n_shared_experts",), default=0),
    Field(
        mg="moe_shared_expert_intermediate_size",
        default=lambda s: (s["n_shared_experts"] or 0) * s["moe_ffn_hidden_size"],
    ),
)
SHARED_BY_SIZE = (
    Field(mg="moe_shared_expert_intermediate_size", hf=("shared_expert_intermediate_size",), required=True),
)

# The ends of the model

EMBEDDING = hf("model.embed_tokens.weight", "vocab hidden")
FIRST = (entry("embedding.word_embeddings.weight", EMBEDDING, rule=Vocabulary()),)


def final_norm(name: str = "model.norm.weight") -> tuple[Entry, ...]:
    """With MTP layers Megatron's block leaves the final norm to the model, which changes its key."""
    return (
        entry("decoder.final_layernorm.weight", hf(name, "hidden"), rule=WHOLE, when="!mtp"),
        entry("final_layernorm.weight", hf(name, "hidden"), rule=WHOLE, when="mtp"),
    )


OUTPUT = (
    entry("output_layer.weight", hf("lm_head.weight", "vocab hidden"), rule=Vocabulary(), when="!tied"),
    # A last stage without the embedding owns a copy of it.
    entry("output_layer.weight", EMBEDDING, rule=Vocabulary(), when="tied pipelined"),
)
LAST = (*final_norm(), *OUTPUT)
TIED_HEAD = (Copy(name="lm_head.weight", of=EMBEDDING.name, shape=EMBEDDING.shape, when="tied", written=False),)
# Buffers that old versions of transformers saved; they follow from the settings.
ROTARY_BUFFERS = (Dropped(pattern="*.rotary_emb.inv_freq", reason="follows from the settings"),)

# Parts of a layer, in the names of Llama

INPUT_NORM = (
    entry("input_layernorm.weight", hf("input_layernorm.weight", "hidden"), rule=WHOLE, when="!te"),
    entry("self_attention.linear_qkv.layer_norm_weight", hf("input_layernorm.weight", "hidden"), rule=WHOLE, when="te"),
)


def mlp_norm(name: str = "post_attention_layernorm.weight") -> tuple[Entry, ...]:
    """Transformer Engine fuses the norm into the MLP's first layer; a router needs it apart."""
    return (
        entry("pre_mlp_layernorm.weight", hf(name, "hidden"), rule=WHOLE, when="!te"),
        entry("pre_mlp_layernorm.weight", hf(name, "hidden"), rule=WHOLE, when="te moe"),
        entry("mlp.linear_fc1.layer_norm_weight", hf(name, "hidden"), rule=WHOLE, when="te dense"),
    )


NORMS = (*INPUT_NORM, *mlp_norm())
QKV = entry(
    "self_attention.linear_qkv.weight",
    hf("self_attn.q_proj.weight", "(heads head_dim) hidden"),
    hf("self_attn.k_proj.weight", "(groups head_dim) hidden"),
    hf("self_attn.v_proj.weight", "(groups head_dim) hidden"),
    rule=GroupedQkv(),
)
QKV_BIAS = entry(
    "self_attention.linear_qkv.bias",
    hf("self_attn.q_proj.bias", "(heads head_dim)"),
    hf("self_attn.k_proj.bias", "(groups head_dim)"),
    hf("self_attn.v_proj.bias", "(groups head_dim)"),
    rule=GroupedQkv(),
    when="add_qkv_bias",
)
PROJECTION = entry("self_attention.linear_proj.weight", hf("self_attn.o_proj.weight", "hidden attention"), rule=COLUMNS)
QK_NORM = (
    entry("self_attention.q_layernorm.weight", hf("self_attn.q_norm.weight", "head_dim"), rule=WHOLE),
    entry("self_attention.k_layernorm.weight", hf("self_attn.k_norm.weight", "head_dim"), rule=WHOLE),
)
ATTENTION = (QKV, PROJECTION)


def gated_mlp(hf_prefix: str, mg_prefix: str, width: str, when: str = "") -> tuple[Entry, ...]:
    """gate, up and down of one MLP; also of shared experts, which every rank cuts by TP."""
    return (
        entry(
            f"{mg_prefix}linear_fc1.weight",
            hf(f"{hf_prefix}gate_proj.weight", f"{width} hidden"),
            hf(f"{hf_prefix}up_proj.weight", f"{width} hidden"),
            rule=ROWS,
            when=when,
        ),
        entry(
            f"{mg_prefix}linear_fc2.weight",
            hf(f"{hf_prefix}down_proj.weight", f"hidden {width}"),
            rule=COLUMNS,
            when=when,
        ),
    )


DENSE_MLP = gated_mlp("mlp.", "mlp.", "ffn", when="dense")


def router(name: str = "mlp.gate.weight", bias: str | None = None) -> tuple[Entry, ...]:
    """The router, and the bias that balances the experts' load where the family has one."""
    weight = entry("mlp.router.weight", hf(name, "experts hidden"), rule=WHOLE, when="moe")
    if bias is None:
        return (weight,)
    return (weight, entry("mlp.router.expert_bias", hf(bias, "experts"), rule=WHOLE, when="moe", keep_dtype=True))


def experts(
    prefix: str = "mlp.experts.{expert}.", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Entry, ...]:
    """Experts with matrices of their own, in Megatron's three layouts: sequential, grouped local, grouped TE."""
    first: tuple[Hf, ...] = (
        hf(f"{prefix}{gate}.weight", "expert_ffn hidden"),
        hf(f"{prefix}{up}.weight", "expert_ffn hidden"),
    )
    second = hf(f"{prefix}{down}.weight", "hidden expert_ffn")
    return (
        entry("mlp.experts.local_experts.{local}.linear_fc1.weight", *first, rule=ROWS, when="moe !grouped"),
        entry("mlp.experts.local_experts.{local}.linear_fc2.weight", second, rule=COLUMNS, when="moe !grouped"),
        entry("mlp.experts.weight1", *first, rule=STACKED_FC1, when="moe grouped !te"),
        entry("mlp.experts.weight2", second, rule=STACKED_FC2, when="moe grouped !te"),
        entry("mlp.experts.linear_fc1.weight{local}", *first, rule=ROWS, when="moe grouped te"),
        entry("mlp.experts.linear_fc2.weight{local}", second, rule=COLUMNS, when="moe grouped te"),
    )


SHARED_EXPERTS = gated_mlp(
    "mlp.shared_experts.", "mlp.shared_experts.", "shared_ffn", when="moe moe_shared_expert_intermediate_size"
)
GATED_SHARED_EXPERT = (
    *gated_mlp("mlp.shared_expert.", "mlp.shared_experts.", "shared_ffn", when="moe"),
    entry("mlp.shared_experts.gate_weight", hf("mlp.shared_expert_gate.weight", "1 hidden"), rule=WHOLE, when="moe"),
)

# Multi-head latent attention. The projections into the latent space are replicated on all TP ranks.

_KV_A = hf("self_attn.kv_a_proj_with_mqa.weight", "kv_lora_rope hidden")
_Q_B = "self_attn.q_b_proj.weight"
_KV_B = "self_attn.kv_b_proj.weight"


def _heads_of(name: str, width: str, rank: str, part: tuple[str, str] | None = None) -> Hf:
    """The up projection of all heads; of each head only a part of its rows where `part` says so."""
    return hf(name, f"(heads {width}) {rank}", {} if part is None else {1: part})


LATENT_ATTENTION = (
    entry(
        "self_attention.linear_qkv.weight",
        hf("self_attn.q_a_proj.weight", "q_lora hidden"),
        _KV_A,
        rule=WHOLE,
        when="q_lora_rank",
    ),
    entry(
        "self_attention.linear_qkv.weight",
        hf("self_attn.q_proj.weight", "latent_query hidden"),
        _KV_A,
        rule=WHOLE,
        when="!q_lora_rank",
    ),
    entry(
        "self_attention.q_layernorm.weight",
        hf("self_attn.q_a_layernorm.weight", "q_lora"),
        rule=WHOLE,
        when="q_lora_rank",
    ),
    entry("self_attention.kv_layernorm.weight", hf("self_attn.kv_a_layernorm.weight", "kv_lora"), rule=WHOLE),
    entry(
        "self_attention.linear_q_up_proj.weight",
        _heads_of(_Q_B, "nope_rope", "q_lora"),
        rule=ROWS,
        when="q_lora_rank !mm_split",
    ),
    entry(
        "self_attention.linear_kv_up_proj.weight",
        _heads_of(_KV_B, "nope_value", "kv_lora"),
        rule=ROWS,
        when="!mm_split",
    ),
    entry(
        "self_attention.linear_qk_nope.weight",
        _heads_of(_Q_B, "nope_rope", "q_lora", ("0", "nope")),
        rule=ROWS,
        when="q_lora_rank mm_split",
    ),
    entry(
        "self_attention.linear_qk_rope.weight",
        _heads_of(_Q_B, "nope_rope", "q_lora", ("nope", "nope_rope")),
        rule=ROWS,
        when="q_lora_rank mm_split",
    ),
    entry(
        "self_attention.linear_kv_nope.weight",
        _heads_of(_KV_B, "nope_value", "kv_lora", ("0", "nope")),
        rule=ROWS,
        when="mm_split",
    ),
    entry(
        "self_attention.linear_v.weight",
        _heads_of(_KV_B, "nope_value", "kv_lora", ("nope", "nope_value")),
        rule=ROWS,
        when="mm_split",
    ),
    entry("self_attention.linear_proj.weight", hf("self_attn.o_proj.weight", "hidden latent_output"), rule=COLUMNS),
)

# Multi-token prediction, in the names of DeepSeek-V3: a layer after the last one, with its own copies of both ends.

MTP = (
    entry("mtp.layers.{mtp}.enorm.weight", hf("enorm.weight", "hidden"), rule=WHOLE),
    entry("mtp.layers.{mtp}.hnorm.weight", hf("hnorm.weight", "hidden"), rule=WHOLE),
    entry("mtp.layers.{mtp}.eh_proj.weight", hf("eh_proj.weight", "hidden two_hidden"), rule=ROWS),
    entry("mtp.final_layernorms.{mtp}.weight", hf("shared_head.norm.weight", "hidden"), rule=WHOLE),
)
MTP_EMBEDDING_NAME = "model.layers.{num_layers}.embed_tokens.weight"
MTP_EMBEDDING = (
    entry(
        "embedding.word_embeddings.weight",
        hf(MTP_EMBEDDING_NAME, EMBEDDING.shape),
        rule=Vocabulary(),
        when="mtp pipelined",
    ),
)
MTP_COPIES = (
    Copy(name="embed_tokens.weight", of=EMBEDDING.name, shape=EMBEDDING.shape),
    Copy(name="shared_head.head.weight", of="lm_head.weight", shape=EMBEDDING.shape),
)
