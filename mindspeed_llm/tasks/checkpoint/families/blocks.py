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
from mindspeed_llm.tasks.checkpoint.tables import Copy, Dropped, Entry, Hf, entry, hf

# The ends of the model

EMBEDDING = hf("model.embed_tokens.weight", "vocab hidden")
HEAD = hf("lm_head.weight", "vocab hidden")


def embedding(source: Hf = EMBEDDING) -> tuple[Entry, ...]:
    """What the first stage holds."""
    return (entry("embedding.word_embeddings.weight", source, rule=Vocabulary()),)


FIRST = embedding()


def final_norm(name: str = "model.norm.weight") -> tuple[Entry, ...]:
    """With MTP layers Megatron's block leaves the final norm to the model, which changes its key."""
    return (
        entry("decoder.final_layernorm.weight", hf(name, "hidden"), rule=WHOLE, when="!mtp"),
        entry("final_layernorm.weight", hf(name, "hidden"), rule=WHOLE, when="mtp"),
    )


def output(source: Hf = EMBEDDING, head: Hf = HEAD) -> tuple[Entry, ...]:
    """The output layer; tied to the embedding, a last stage that does not have it owns a copy."""
    return (
        entry("output_layer.weight", head, rule=Vocabulary(), when="!tied"),
        entry("output_layer.weight", source, rule=Vocabulary(), when="tied pipelined"),
    )


def tied_head(source: Hf = EMBEDDING, head: Hf = HEAD) -> tuple[Copy, ...]:
    """An output layer that checkpoints of tied models may have in spite of that."""
    return (Copy(name=head.name, of=source.name, shape=source.shape, when="tied", written=False),)


LAST = (*final_norm(), *output())
TIED_HEAD = tied_head()
# Buffers that old versions of transformers saved; they follow from the settings.
ROTARY_BUFFERS = (Dropped(pattern="*.rotary_emb.inv_freq", reason="follows from the settings"),)
IMAGE_PARTS = tuple(
    Dropped(pattern=f"{prefix}{part}.*", reason="for images, only the language model is converted")
    for part in ("vision_tower", "multi_modal_projector")
    for prefix in ("", "model.")
)

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
PROJECTION_BIAS = entry(
    "self_attention.linear_proj.bias", hf("self_attn.o_proj.bias", "hidden"), rule=WHOLE, when="add_dense_bias"
)
ATTENTION_BIASES = (QKV_BIAS, PROJECTION_BIAS)


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
MLP_BIASES = (
    entry(
        "mlp.linear_fc1.bias",
        hf("mlp.gate_proj.bias", "ffn"),
        hf("mlp.up_proj.bias", "ffn"),
        rule=ROWS,
        when="dense add_mlp_bias",
    ),
    entry("mlp.linear_fc2.bias", hf("mlp.down_proj.bias", "hidden"), rule=WHOLE, when="dense add_mlp_bias"),
)
PACKED_MLP = (
    # gate and up in one matrix, one below the other
    entry(
        "mlp.linear_fc1.weight",
        *(hf("mlp.gate_up_proj.weight", "(2 ffn) hidden", {0: half}) for half in (0, 1)),
        rule=ROWS,
    ),
    entry("mlp.linear_fc2.weight", hf("mlp.down_proj.weight", "hidden ffn"), rule=COLUMNS),
)


def packed_qkv(name: str) -> Entry:
    """Query, key and value in one matrix: all query heads, then all key heads, then all value heads."""
    runs = (("0", "key_start"), ("key_start", "value_start"), ("value_start", "all_heads"))
    return entry(
        "self_attention.linear_qkv.weight",
        *(hf(name, "(all_heads head_dim) hidden", {0: run}) for run in runs),
        rule=GroupedQkv(),
    )


def router(name: str = "mlp.gate.weight", bias: str | None = None, *, rows: str = "experts") -> tuple[Entry, ...]:
    """The router, and the bias that balances the experts' load where the family has one."""
    weight = entry("mlp.router.weight", hf(name, f"{rows} hidden"), rule=WHOLE, when="moe")
    if bias is None:
        return (weight,)
    return (weight, entry("mlp.router.expert_bias", hf(bias, rows), rule=WHOLE, when="moe", keep_dtype=True))


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


def shared_experts(prefix: str = "mlp.shared_experts.") -> tuple[Entry, ...]:
    """Experts that all tokens go through, as one MLP."""
    return gated_mlp(prefix, "mlp.shared_experts.", "shared_ffn", when="moe moe_shared_expert_intermediate_size")


SHARED_EXPERTS = shared_experts()
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

# The sparse indexer of DeepSeek-V3.2, which every TP rank has whole. Layers that share another one's have none.

INDEXER = tuple(
    entry(f"self_attention.dsa_indexer.{name}", hf(f"self_attn.indexer.{name}", shape), rule=WHOLE, when="indexer")
    for name, shape in (
        ("k_norm.weight", "index_dim"),
        ("k_norm.bias", "index_dim"),
        ("weights_proj.weight", "index_heads hidden"),
        ("wk.weight", "index_dim hidden"),
        ("wq_b.weight", "(index_heads index_dim) q_lora"),
    )
)

# Multi-token prediction, in the names of DeepSeek-V3: a layer after the last one, with its own copies of both ends.


def mtp_layer(norm: str = "shared_head.norm.weight") -> tuple[Entry, ...]:
    """What stands around the layer; `norm` is the one behind it."""
    return (
        entry("mtp.layers.{mtp}.enorm.weight", hf("enorm.weight", "hidden"), rule=WHOLE),
        entry("mtp.layers.{mtp}.hnorm.weight", hf("hnorm.weight", "hidden"), rule=WHOLE),
        entry("mtp.layers.{mtp}.eh_proj.weight", hf("eh_proj.weight", "hidden two_hidden"), rule=ROWS),
        entry("mtp.final_layernorms.{mtp}.weight", hf(norm, "hidden"), rule=WHOLE),
    )


MTP = mtp_layer()
MTP_EMBEDDING_NAME = "model.layers.{num_layers}.embed_tokens.weight"
MTP_EMBEDDING = (
    entry(
        "embedding.word_embeddings.weight",
        hf(MTP_EMBEDDING_NAME, EMBEDDING.shape),
        rule=Vocabulary(),
        when="mtp pipelined",
    ),
)


def mtp_of_main_embedding(source: Hf = EMBEDDING) -> tuple[Entry, ...]:
    """The embedding of a stage with MTP layers that have none of their own."""
    return (entry("embedding.word_embeddings.weight", source, rule=Vocabulary(), when="mtp pipelined"),)


MTP_COPIES = (
    Copy(name="embed_tokens.weight", of=EMBEDDING.name, shape=EMBEDDING.shape),
    Copy(name="shared_head.head.weight", of="lm_head.weight", shape=EMBEDDING.shape),
)
