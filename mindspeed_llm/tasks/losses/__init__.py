"""Losses that both training backends share."""
