"""Configuration of the FSDP2 backend: dataclasses, loader and checks. Needs neither torch nor transformers."""

from mindspeed_llm.fsdp2.config.checks import check_config
from mindspeed_llm.fsdp2.config.command_line import Invocation, folder_to_list, parse_command_line
from mindspeed_llm.fsdp2.config.config import Config, resolved_dict
from mindspeed_llm.fsdp2.config.data_config import DataConfig
from mindspeed_llm.fsdp2.config.inference_config import InferenceConfig
from mindspeed_llm.fsdp2.config.model_config import ModelConfig
from mindspeed_llm.fsdp2.config.optimization_config import OptimizationConfig
from mindspeed_llm.fsdp2.config.parallel_config import ParallelConfig
from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
from mindspeed_llm.fsdp2.config.yaml_file import dump_yaml

__all__ = [
    "Config",
    "ModelConfig",
    "DataConfig",
    "ParallelConfig",
    "TrainingConfig",
    "OptimizationConfig",
    "InferenceConfig",
    "Invocation",
    "parse_command_line",
    "folder_to_list",
    "check_config",
    "resolved_dict",
    "dump_yaml",
]
