"""Reading and writing weights in the Hugging Face layout, shard by shard."""
