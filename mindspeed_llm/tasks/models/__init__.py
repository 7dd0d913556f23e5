"""Models of the Megatron backend: their layers, their configuration, their weights."""
