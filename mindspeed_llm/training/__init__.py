"""Megatron backend: from a command line to a trained model."""
