"""FSDP2 backend: one YAML to a trained Hugging Face model. Importing it has no side effect."""
