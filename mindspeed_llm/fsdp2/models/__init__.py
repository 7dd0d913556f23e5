"""Models of the FSDP2 backend: any transformers causal language model, built plainly or on the meta device."""
