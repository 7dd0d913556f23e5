"""The whole configuration: one dataclass per section, and its plain form for `run_config.yaml`."""

from dataclasses import asdict, dataclass, field
from typing import Any

from mindspeed_llm.fsdp2.config.data_config import DataConfig
from mindspeed_llm.fsdp2.config.inference_config import InferenceConfig
from mindspeed_llm.fsdp2.config.model_config import ModelConfig
from mindspeed_llm.fsdp2.config.optimization_config import OptimizationConfig
from mindspeed_llm.fsdp2.config.parallel_config import ParallelConfig
from mindspeed_llm.fsdp2.config.training_config import TrainingConfig

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "training": TrainingConfig,
    "optimization": OptimizationConfig,
    "inference": InferenceConfig,
}

# Fields that are neither printed nor written.
SECRETS = frozenset({"model.hf_hub_token", "model.ms_hub_token", "model.om_hub_token"})


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)

    @property
    def needs_reference(self) -> bool:
        """Whether DPO holds a second model: not where the reference is the model itself without its adapters."""
        training = self.training
        return training.stage == "dpo" and (training.ref_model is not None or not self.model.has_adapters)


def resolved_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Every field of every section as plain values, ready for YAML. Hub tokens are null, since the file is shared.

    Loading what is dumped from it gives an equal configuration (tokens apart).
    """
    plain = asdict(config)
    for name in SECRETS:
        section, field_name = name.split(".")
        plain[section][field_name] = None
    return plain
