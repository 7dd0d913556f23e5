"""An OpenAI-compatible endpoint over one model: HTTP in one thread, the model in another."""
