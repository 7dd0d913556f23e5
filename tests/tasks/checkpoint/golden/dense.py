"""Tables of dense families; see the package."""

_ENDS = """
[first]
embedding.word_embeddings.weight        509x48   vocab    model.embed_tokens.weight
[last]
decoder.final_layernorm.weight          48       copy     model.norm.weight
"""
_HEAD = """
output_layer.weight                     509x48   vocab    lm_head.weight
"""
_NORMS = """
[0 1 2 3]
input_layernorm.weight                  48       copy     input_layernorm.weight
pre_mlp_layernorm.weight                48       copy     post_attention_layernorm.weight
"""
_ATTENTION = """
self_attention.linear_qkv.weight        160x48   qkv      self_attn.{q,k,v}_proj.weight
self_attention.linear_proj.weight       48x96    columns  self_attn.o_proj.weight
"""
_QKV_BIAS = """
self_attention.linear_qkv.bias          160      qkv      self_attn.{q,k,v}_proj.bias
"""
_MLP = """
mlp.linear_fc1.weight                   176x48   rows     mlp.{gate,up}_proj.weight
mlp.linear_fc2.weight                   48x88    columns  mlp.down_proj.weight
"""
# megatron-core's own names of biases; upstream has flags for the first two (--add-qkv-bias, --add-dense-bias).
_BIASES = """
self_attention.linear_proj.bias         48       copy     self_attn.o_proj.bias
mlp.linear_fc1.bias                     176      rows     mlp.{gate,up}_proj.bias
mlp.linear_fc2.bias                     48       copy     mlp.down_proj.bias
"""
_ALL_BIASES = _ENDS + _HEAD + _NORMS + _ATTENTION + _QKV_BIAS + _MLP + _BIASES
_GEMMA_NORMS = """
[0 1 2 3]
input_layernorm.weight                  48       copy     input_layernorm.weight
post_attn_norm.weight                   48       copy     post_attention_layernorm.weight
pre_mlp_layernorm.weight                48       copy     pre_feedforward_layernorm.weight
post_mlp_layernorm.weight               48       copy     post_feedforward_layernorm.weight
self_attention.q_layernorm.weight       16       copy     self_attn.q_norm.weight
self_attention.k_layernorm.weight       16       copy     self_attn.k_norm.weight
"""
_GLM4 = """
[0 1 2 3]
input_layernorm.weight                  48       copy     input_layernorm.weight
post_attn_norm.weight                   48       copy     post_self_attn_layernorm.weight
pre_mlp_layernorm.weight                48       copy     post_attention_layernorm.weight
post_mlp_layernorm.weight               48       copy     post_mlp_layernorm.weight
mlp.linear_fc1.weight                   176x48   halves   mlp.gate_up_proj.weight
mlp.linear_fc2.weight                   48x88    columns  mlp.down_proj.weight
"""

TABLES = {
    "llama-biases": _ENDS + _NORMS + _ATTENTION + _QKV_BIAS + _MLP + _BIASES,
    "mistral": _ENDS + _HEAD + _NORMS + _ATTENTION + _MLP,
    "internlm3": _ALL_BIASES,
    "seed-oss": _ALL_BIASES,
    "gemma3": _ENDS + _GEMMA_NORMS + _ATTENTION + _MLP,
    "glm4": _ENDS + _HEAD + _GLM4 + _ATTENTION + _QKV_BIAS,
}
# The last stage of a tied model that does not have the embedding owns a copy of it.
TIED = ("llama-biases", "gemma3", "plm")
