"""Checks of arguments, one subject a file; each also puts in what follows from what was given."""
