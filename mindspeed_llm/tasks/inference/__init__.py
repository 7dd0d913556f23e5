"""Generation of text, over what each backend's models offer."""
