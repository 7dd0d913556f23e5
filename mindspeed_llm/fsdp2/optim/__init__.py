"""Optimizers, learning rate schedule, gradient clipping and loss scaling of the FSDP2 backend."""
