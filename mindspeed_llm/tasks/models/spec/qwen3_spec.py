"""Qwen 3, dense and MoE."""

from mindspeed_llm.tasks.models.layer_specs import decoder_layer

layer_spec = decoder_layer
