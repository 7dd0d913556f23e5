"""The command line of the Megatron backend: flags as tables, their parsing, and all checks that need no tensor.

Nothing here loads torch before the arguments have passed, so that a mistake is answered at once. What needs the model's
tables (`model_from_hf`, `plan`) imports them when it is called.
"""
