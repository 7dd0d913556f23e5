"""Features of the Megatron backend: each one its flags, its checks, and what it changes in megatron-core."""
