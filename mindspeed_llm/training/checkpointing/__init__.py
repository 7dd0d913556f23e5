"""Checkpoints of the Megatron backend: `save_checkpoint` and `load_checkpoint`."""

from mindspeed_llm.training.checkpointing.load import load_checkpoint as load_checkpoint
from mindspeed_llm.training.checkpointing.save import save_checkpoint as save_checkpoint
