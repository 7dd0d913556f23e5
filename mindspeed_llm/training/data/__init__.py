"""Data of the Megatron backend: indexed files -> samples in Megatron's order -> micro batches of a rank."""
