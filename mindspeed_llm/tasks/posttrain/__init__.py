"""Post-training on the Megatron backend."""
