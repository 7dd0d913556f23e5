"""The command lines of inference.py and evaluation.py: flags as tables, their parsing, and what contradicts what.

Nothing here loads torch, so that a mistake is answered at once. Flags of the Megatron backend come from its own tables,
which are imported when a command line is read.
"""
