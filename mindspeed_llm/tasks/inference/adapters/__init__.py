"""Adapters: what a backend's models offer as `tasks.inference.backend.Backend`."""
