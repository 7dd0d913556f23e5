"""Tables of families with multi-head latent attention; see the package."""

_ENDS = """
[first]
embedding.word_embeddings.weight               509x48  vocab    model.embed_tokens.weight
[last]
decoder.final_layernorm.weight                 48      copy     model.norm.weight
"""
_HEAD = """
output_layer.weight                            509x48  vocab    lm_head.weight
"""
_ATTENTION = """
[0 1 2 3]
input_layernorm.weight                         48      copy     input_layernorm.weight
pre_mlp_layernorm.weight                       48      copy     post_attention_layernorm.weight
self_attention.kv_layernorm.weight             14      copy     self_attn.kv_a_layernorm.weight
self_attention.linear_kv_up_proj.weight        132x14  rows     self_attn.kv_b_proj.weight
self_attention.linear_proj.weight              48x72   columns  self_attn.o_proj.weight
"""
_QUERY_RANK = """
self_attention.linear_qkv.weight               38x48   stack    self_attn.{q_a_proj,kv_a_proj_with_mqa}.weight
self_attention.q_layernorm.weight              20      copy     self_attn.q_a_layernorm.weight
self_attention.linear_q_up_proj.weight         84x20   rows     self_attn.q_b_proj.weight
"""
_INDEXER = """
self_attention.dsa_indexer.k_norm.weight       8       copy     self_attn.indexer.k_norm.weight
self_attention.dsa_indexer.k_norm.bias         8       copy     self_attn.indexer.k_norm.bias
self_attention.dsa_indexer.weights_proj.weight 4x48    copy     self_attn.indexer.weights_proj.weight
self_attention.dsa_indexer.wk.weight           8x48    copy     self_attn.indexer.wk.weight
self_attention.dsa_indexer.wq_b.weight         32x20   copy     self_attn.indexer.wq_b.weight
"""
_DENSE_THEN_EXPERTS = """
[0]
mlp.linear_fc1.weight                          176x48  rows     mlp.{gate,up}_proj.weight
mlp.linear_fc2.weight                          48x88   columns  mlp.down_proj.weight
[1 2 3]
mlp.router.weight                              8x48    copy     mlp.gate.weight
mlp.experts.local_experts.{e}.linear_fc1.weight 48x48  rows     mlp.experts.{e}.{gate,up}_proj.weight
mlp.experts.local_experts.{e}.linear_fc2.weight 48x24  columns  mlp.experts.{e}.down_proj.weight
mlp.shared_experts.linear_fc1.weight           96x48   rows     mlp.shared_experts.{gate,up}_proj.weight
mlp.shared_experts.linear_fc2.weight           48x48   columns  mlp.shared_experts.down_proj.weight
"""
_BIAS = """
mlp.router.expert_bias                         8       copy     mlp.gate.e_score_correction_bias
"""
_LONGCAT = """
[0 1 2 3]
input_layernorm_0.weight                       48      copy     input_layernorm.0.weight
input_layernorm_1.weight                       48      copy     input_layernorm.1.weight
pre_mlp_layernorm_0.weight                     48      copy     post_attention_layernorm.0.weight
pre_mlp_layernorm_1.weight                     48      copy     post_attention_layernorm.1.weight
self_attention_0.kv_layernorm.weight           14      copy     self_attn.0.kv_a_layernorm.weight
self_attention_1.kv_layernorm.weight           14      copy     self_attn.1.kv_a_layernorm.weight
self_attention_0.linear_kv_up_proj.weight      132x14  rows     self_attn.0.kv_b_proj.weight
self_attention_1.linear_kv_up_proj.weight      132x14  rows     self_attn.1.kv_b_proj.weight
self_attention_0.linear_proj.weight            48x72   columns  self_attn.0.o_proj.weight
self_attention_1.linear_proj.weight            48x72   columns  self_attn.1.o_proj.weight
self_attention_0.linear_qkv.weight             38x48   stack    self_attn.0.{q_a_proj,kv_a_proj_with_mqa}.weight
self_attention_1.linear_qkv.weight             38x48   stack    self_attn.1.{q_a_proj,kv_a_proj_with_mqa}.weight
self_attention_0.q_layernorm.weight            20      copy     self_attn.0.q_a_layernorm.weight
self_attention_1.q_layernorm.weight            20      copy     self_attn.1.q_a_layernorm.weight
self_attention_0.linear_q_up_proj.weight       84x20   rows     self_attn.0.q_b_proj.weight
self_attention_1.linear_q_up_proj.weight       84x20   rows     self_attn.1.q_b_proj.weight
mlps_0.linear_fc1.weight                       176x48  rows     mlps.0.{gate,up}_proj.weight
mlps_1.linear_fc1.weight                       176x48  rows     mlps.1.{gate,up}_proj.weight
mlps_0.linear_fc2.weight                       48x88   columns  mlps.0.down_proj.weight
mlps_1.linear_fc2.weight                       48x88   columns  mlps.1.down_proj.weight
mlp.router.weight                              12x48   copy     mlp.router.classifier.weight
mlp.router.expert_bias                         12      copy     mlp.router.e_score_correction_bias
mlp.experts.local_experts.{e}.linear_fc1.weight 48x48  rows     mlp.experts.{e}.{gate,up}_proj.weight
mlp.experts.local_experts.{e}.linear_fc2.weight 48x24  columns  mlp.experts.{e}.down_proj.weight
"""
_PLM = """
self_attention.linear_qkv.weight               102x48  stack    self_attn.{q_proj,kv_a_proj_with_mqa}.weight
mlp.linear_fc1.weight                          88x48   rows     mlp.up_proj.weight
mlp.linear_fc2.weight                          48x88   columns  mlp.down_proj.weight
"""
_V3 = _ENDS + _HEAD + _ATTENTION + _QUERY_RANK

TABLES = {
    "deepseek2": _V3 + _DENSE_THEN_EXPERTS,
    "deepseek32": _V3 + _INDEXER + _DENSE_THEN_EXPERTS + _BIAS,
    # Layers 1 and 3 share the indexer of the layer before.
    "glm5": _V3 + "\n[0 2]\n" + _INDEXER + _DENSE_THEN_EXPERTS + _BIAS,
    "longcat": _ENDS + _HEAD + _LONGCAT,
    "plm": _ENDS + _ATTENTION + _PLM,
}

# Tensors that no class of transformers makes: name -> shape.

_LAYER = {
    "input_layernorm.weight": (48,),
    "post_attention_layernorm.weight": (48,),
    "self_attn.q_a_proj.weight": (20, 48),
    "self_attn.q_a_layernorm.weight": (20,),
    "self_attn.q_b_proj.weight": (84, 20),
    "self_attn.kv_a_proj_with_mqa.weight": (18, 48),
    "self_attn.kv_a_layernorm.weight": (14,),
    "self_attn.kv_b_proj.weight": (132, 14),
    "self_attn.o_proj.weight": (48, 72),
    "self_attn.indexer.k_norm.weight": (8,),
    "self_attn.indexer.k_norm.bias": (8,),
    "self_attn.indexer.weights_proj.weight": (4, 48),
    "self_attn.indexer.wk.weight": (8, 48),
    "self_attn.indexer.wq_b.weight": (32, 20),
    "mlp.gate.weight": (8, 48),
    "mlp.gate.e_score_correction_bias": (8,),
    "mlp.shared_experts.gate_proj.weight": (48, 48),
    "mlp.shared_experts.up_proj.weight": (48, 48),
    "mlp.shared_experts.down_proj.weight": (48, 48),
    **{
        f"mlp.experts.{expert}.{name}.weight": shape
        for expert in range(8)
        for name, shape in {"gate_proj": (24, 48), "up_proj": (24, 48), "down_proj": (48, 24)}.items()
    },
    "enorm.weight": (48,),
    "hnorm.weight": (48,),
    "eh_proj.weight": (48, 96),
    "shared_head.norm.weight": (48,),
}
GLM5_MTP = {f"model.layers.4.{name}": shape for name, shape in _LAYER.items()}
DEEPSEEK32_MTP = GLM5_MTP | {
    "model.layers.4.embed_tokens.weight": (509, 48),
    "model.layers.4.shared_head.head.weight": (509, 48),
}
PLM_TENSORS = {"model.embed_tokens.weight": (509, 48), "model.norm.weight": (48,)} | {
    f"model.layers.{layer}.{name}": shape
    for layer in range(4)
    for name, shape in {
        "input_layernorm.weight": (48,),
        "post_attention_layernorm.weight": (48,),
        "self_attn.q_proj.weight": (84, 48),
        "self_attn.kv_a_proj_with_mqa.weight": (18, 48),
        "self_attn.kv_a_layernorm.weight": (14,),
        "self_attn.kv_b_proj.weight": (132, 14),
        "self_attn.o_proj.weight": (48, 72),
        "mlp.up_proj.weight": (88, 48),
        "mlp.down_proj.weight": (48, 88),
    }.items()
}

# MTP layers: the layer itself as above, behind `mtp.layers.0.transformer_layer.`, and what stands around it.

MTP_AROUND = """
mtp.layers.0.enorm.weight                      48      copy     model.layers.4.enorm.weight
mtp.layers.0.hnorm.weight                      48      copy     model.layers.4.hnorm.weight
mtp.layers.0.eh_proj.weight                    48x96   rows     model.layers.4.eh_proj.weight
mtp.final_layernorms.0.weight                  48      copy     model.layers.4.shared_head.norm.weight
"""
