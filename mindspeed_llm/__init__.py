"""LLM training suite with an FSDP2 and a Megatron backend, on Ascend NPU, CUDA and plain CPU."""

__version__ = "0.1.0"
