"""Tables of families with experts and grouped-query attention; see the package."""

_FIRST = """
[first]
embedding.word_embeddings.weight        509x48   vocab    model.embed_tokens.weight
"""
_LAST = """
[last]
decoder.final_layernorm.weight          48       copy     model.norm.weight
output_layer.weight                     509x48   vocab    lm_head.weight
"""
_NORMS = """
[0 1 2 3]
input_layernorm.weight                  48       copy     input_layernorm.weight
pre_mlp_layernorm.weight                48       copy     post_attention_layernorm.weight
"""
_NARROW = """
self_attention.linear_qkv.weight        80x48    qkv      self_attn.{q,k,v}_proj.weight
self_attention.linear_proj.weight       48x48    columns  self_attn.o_proj.weight
"""
_WIDE = """
self_attention.linear_qkv.weight        160x48   qkv      self_attn.{q,k,v}_proj.weight
self_attention.linear_proj.weight       48x96    columns  self_attn.o_proj.weight
"""
_MIXTRAL = """
mlp.router.weight                       8x48     copy     block_sparse_moe.gate.weight
mlp.experts.local_experts.{e}.linear_fc1.weight 176x48 rows block_sparse_moe.experts.{e}.{w1,w3}.weight
mlp.experts.local_experts.{e}.linear_fc2.weight 48x88 columns block_sparse_moe.experts.{e}.w2.weight
"""
# Biases of norms and of the output layer stand beside their weights, as in megatron-core.
_PHI_BIASES = """
input_layernorm.bias                    48       copy     input_layernorm.bias
pre_mlp_layernorm.bias                  48       copy     post_attention_layernorm.bias
self_attention.linear_qkv.bias          80       qkv      self_attn.{q,k,v}_proj.bias
self_attention.linear_proj.bias         48       copy     self_attn.o_proj.bias
[last]
decoder.final_layernorm.bias            48       copy     model.norm.bias
output_layer.bias                       509      vocab    lm_head.bias
"""
# No facts: upstream has no converter of gpt-oss. megatron-core 0.16.1: DotProductAttention.softmax_offset, Router.bias,
# and the biases of parallel linear layers.
_GPT_OSS = """
self_attention.linear_qkv.bias          160      qkv      self_attn.{q,k,v}_proj.bias
self_attention.linear_proj.bias         48       copy     self_attn.o_proj.bias
self_attention.core_attention.softmax_offset 6   rows     self_attn.sinks
mlp.router.weight                       8x48     copy     mlp.router.weight
mlp.router.bias                         8        copy     mlp.router.bias
mlp.experts.local_experts.{e}.linear_fc1.weight 176x48 turns mlp.experts.gate_up_proj
mlp.experts.local_experts.{e}.linear_fc1.bias   176    turns mlp.experts.gate_up_proj_bias
mlp.experts.local_experts.{e}.linear_fc2.weight 48x88 turned mlp.experts.down_proj
mlp.experts.local_experts.{e}.linear_fc2.bias   48     each  mlp.experts.down_proj_bias
"""
_ROUTED = """
mlp.experts.local_experts.{e}.linear_fc1.weight 48x48 rows mlp.experts.{e}.{gate,up}_proj.weight
mlp.experts.local_experts.{e}.linear_fc2.weight 48x24 columns mlp.experts.{e}.down_proj.weight
"""
_QK_NORM = """
self_attention.q_layernorm.weight       16       copy     self_attn.q_norm.weight
self_attention.k_layernorm.weight       16       copy     self_attn.k_norm.weight
"""
_DENSE = """
mlp.linear_fc1.weight                   176x48   rows     mlp.{gate,up}_proj.weight
mlp.linear_fc2.weight                   48x88    columns  mlp.down_proj.weight
"""
_HUNYUAN_EXPERTS = """
mlp.router.weight                       8x48     copy     mlp.router.gate.weight
mlp.router.expert_bias                  8        copy     mlp.expert_bias
mlp.shared_experts.linear_fc1.weight    48x48    rows     mlp.shared_mlp.{gate,up}_proj.weight
mlp.shared_experts.linear_fc2.weight    48x24    columns  mlp.shared_mlp.down_proj.weight
"""
_BAILING = """
[first]
embedding.word_embeddings.weight        509x48   vocab    model.word_embeddings.weight
[0 1 2 3]
self_attention.linear_qkv.weight        160x48   packed   attention.query_key_value.weight
self_attention.linear_proj.weight       48x96    columns  attention.dense.weight
self_attention.q_layernorm.weight       16       copy     attention.query_layernorm.weight
self_attention.k_layernorm.weight       16       copy     attention.key_layernorm.weight
"""
_BAILING_EXPERTS = """
mlp.router.weight                       8x48     copy     mlp.gate.weight
mlp.router.expert_bias                  8        copy     mlp.gate.expert_bias
mlp.shared_experts.linear_fc1.weight    48x48    rows     mlp.shared_experts.{gate,up}_proj.weight
mlp.shared_experts.linear_fc2.weight    48x24    columns  mlp.shared_experts.down_proj.weight
"""
_GLM45 = """
self_attention.linear_qkv.bias          160      qkv      self_attn.{q,k,v}_proj.bias
[0]
mlp.linear_fc1.weight                   176x48   rows     mlp.{gate,up}_proj.weight
mlp.linear_fc2.weight                   48x88    columns  mlp.down_proj.weight
[1 2 3]
mlp.router.weight                       8x48     copy     mlp.gate.weight
mlp.router.expert_bias                  8        copy     mlp.gate.e_score_correction_bias
mlp.shared_experts.linear_fc1.weight    96x48    rows     mlp.shared_experts.{gate,up}_proj.weight
mlp.shared_experts.linear_fc2.weight    48x48    columns  mlp.shared_experts.down_proj.weight
"""

TABLES = {
    "mixtral": _FIRST + _LAST + _NORMS + _NARROW + _MIXTRAL,
    "phi3.5-moe": _FIRST + _LAST + _NORMS + _NARROW + _MIXTRAL + _PHI_BIASES,
    "gpt-oss": _FIRST + _LAST + _NORMS + _WIDE + _GPT_OSS,
    "HYV3": _FIRST + _LAST + _NORMS + _WIDE + _QK_NORM + f"[0 1]{_DENSE}[2 3]{_HUNYUAN_EXPERTS}{_ROUTED}",
    "bailing_mini": _BAILING + _LAST + _NORMS + f"[0]{_DENSE}[1 2 3]{_BAILING_EXPERTS}{_ROUTED}",
    # GLM-4.5 as opposed to Air: with query and key norms.
    "glm45": _FIRST + _LAST + _NORMS + _WIDE + _QK_NORM + _GLM45 + _ROUTED,
}

# Tensors that no class of transformers makes: name -> shape.

_EXPERTS = {
    f"mlp.experts.{expert}.{name}.weight": shape
    for expert in range(8)
    for name, shape in {"gate_proj": (24, 48), "up_proj": (24, 48), "down_proj": (48, 24)}.items()
}
_AROUND = {
    "enorm.weight": (48,),
    "hnorm.weight": (48,),
    "eh_proj.weight": (48, 96),
    "final_layernorm.weight": (48,),
}
HYV3_MTP = {
    f"model.layers.4.{name}": shape
    for name, shape in {
        "input_layernorm.weight": (48,),
        "post_attention_layernorm.weight": (48,),
        "self_attn.q_proj.weight": (96, 48),
        "self_attn.k_proj.weight": (32, 48),
        "self_attn.v_proj.weight": (32, 48),
        "self_attn.o_proj.weight": (48, 96),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "mlp.router.gate.weight": (8, 48),
        "mlp.expert_bias": (8,),
        "mlp.shared_mlp.gate_proj.weight": (24, 48),
        "mlp.shared_mlp.up_proj.weight": (24, 48),
        "mlp.shared_mlp.down_proj.weight": (48, 24),
        **_EXPERTS,
        **_AROUND,
    }.items()
}
_BAILING_LAYER = {
    "input_layernorm.weight": (48,),
    "post_attention_layernorm.weight": (48,),
    "attention.query_key_value.weight": (160, 48),
    "attention.dense.weight": (48, 96),
    "attention.query_layernorm.weight": (16,),
    "attention.key_layernorm.weight": (16,),
}
_BAILING_SPARSE = _BAILING_LAYER | {
    "mlp.gate.weight": (8, 48),
    "mlp.gate.expert_bias": (8,),
    "mlp.shared_experts.gate_proj.weight": (24, 48),
    "mlp.shared_experts.up_proj.weight": (24, 48),
    "mlp.shared_experts.down_proj.weight": (48, 24),
    **_EXPERTS,
}
_BAILING_DENSE = _BAILING_LAYER | {
    "mlp.gate_proj.weight": (88, 48),
    "mlp.up_proj.weight": (88, 48),
    "mlp.down_proj.weight": (48, 88),
}
BAILING_TENSORS = {
    "model.word_embeddings.weight": (509, 48),
    "model.norm.weight": (48,),
    "lm_head.weight": (509, 48),
    **{
        f"model.layers.{layer}.{name}": shape
        for layer, tensors in enumerate(
            [_BAILING_DENSE, _BAILING_SPARSE, _BAILING_SPARSE, _BAILING_SPARSE, _BAILING_SPARSE | _AROUND]
        )
        for name, shape in tensors.items()
    },
}
# What stands around an MTP layer, whose norm has another name than DeepSeek's.
MTP_AROUND = """
mtp.layers.0.enorm.weight               48       copy     model.layers.4.enorm.weight
mtp.layers.0.hnorm.weight               48       copy     model.layers.4.hnorm.weight
mtp.layers.0.eh_proj.weight             48x96    rows     model.layers.4.eh_proj.weight
mtp.final_layernorms.0.weight           48       copy     model.layers.4.final_layernorm.weight
"""
