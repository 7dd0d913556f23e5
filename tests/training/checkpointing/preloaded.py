"""Imports that take long, for a process from which ranks are forked: a start then takes a second, not fifteen."""

import torch

from mindspeed_llm.platform import cuda_names

torch.set_num_threads(1)
# megatron-core looks for a device when it is imported.
cuda_names.install()

import mindspeed_llm.training.checkpointing.loading  # noqa: E402
import mindspeed_llm.training.checkpointing.saving  # noqa: E402
import mindspeed_llm.training.data.datasets  # noqa: E402
import mindspeed_llm.training.loop  # noqa: E402
import mindspeed_llm.training.main  # noqa: E402
import mindspeed_llm.training.pretrain  # noqa: E402,F401
