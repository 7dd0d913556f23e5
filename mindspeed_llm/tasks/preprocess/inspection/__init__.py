"""Show samples of a data set as they will be trained on: `preprocess_data.py --inspect`."""

from mindspeed_llm.tasks.preprocess.inspection.inspecting import inspect_prefix

__all__ = ["inspect_prefix"]
