"""Benchmarks: what is asked, how answers are read, and what the scores are. Nothing here knows a model."""
