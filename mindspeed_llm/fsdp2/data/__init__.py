"""FSDP2 data managers: stored samples -> order -> micro batches of tensors."""
