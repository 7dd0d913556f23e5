"""Weight conversion: which Hugging Face tensor stands where in a Megatron checkpoint, and moving the values over."""
