"""Qwen 2 MoE: a shared expert with a gate."""

from mindspeed_llm.tasks.models.layer_specs import decoder_layer

layer_spec = decoder_layer
