"""Modules of the Megatron backend: what megatron-core lacks, or has for one device only."""
