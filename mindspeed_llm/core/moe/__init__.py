"""Mixture of experts: what megatron-core has for one device only."""
