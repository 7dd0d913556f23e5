"""Shared preprocessing: record -> messages -> template -> token ids and loss mask -> stored samples."""
