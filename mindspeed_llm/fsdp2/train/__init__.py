"""The training loop of the FSDP2 backend."""
