"""LoRA (Hu et al. 2021) on the parallel linear layers of the Megatron backend."""
