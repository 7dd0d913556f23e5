"""What checkpoints of both backends share: lists of files, ranks that act together, reading without executing."""
