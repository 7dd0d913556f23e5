"""Building a model: configuration, class, weights, sharding."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from mindspeed_llm.errors import UserError, in_one_line
from mindspeed_llm.fsdp2.checkpoint.hf_load import load_weights, read_weight_map
from mindspeed_llm.fsdp2.checkpoint.hf_names import ModelWeights
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.config.model_config import ModelConfig
from mindspeed_llm.fsdp2.config.model_files import check_no_adapter
from mindspeed_llm.fsdp2.config.reference_model import naming_reference, reference_config
from mindspeed_llm.fsdp2.distributed.fsdp import ShardedModel
from mindspeed_llm.fsdp2.distributed.mesh import DataMesh
from mindspeed_llm.fsdp2.distributed.parallelize import check_patterns, parallelize
from mindspeed_llm.fsdp2.models.fused import apply_fused_operators, choose_attention
from mindspeed_llm.fsdp2.models.initialize import initialize_computed_buffers, initialize_weights
from mindspeed_llm.fsdp2.models.trainable import choose_trainable
from mindspeed_llm.observability.log import get_logger

if TYPE_CHECKING:
    from peft import LoraConfig

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A sharded model on its device.

    `source_config` is the configuration as it was read, before anything was set for training; `source_dtypes` holds the
    dtype on disk of each parameter that came from files, by its name without adapters (empty when trained from
    scratch); `adapter` is what adapter_config.json says, None without adapters.
    """

    model: PreTrainedModel
    sharded: ShardedModel
    source_config: PretrainedConfig
    source_dtypes: dict[str, torch.dtype]
    adapter: LoraConfig | None = None

    def export_dtype(self, name: str) -> torch.dtype:
        """The dtype that parameter `name` has in the source; for a model from scratch the one of its configuration."""
        if name in self.source_dtypes:
            return self.source_dtypes[name]
        dtype = self.source_config.dtype
        return dtype if isinstance(dtype, torch.dtype) else torch.float32


class ModelFactory:
    """`ModelFactory.create(config, mesh=..., device=...)`: a sharded model with its weights loaded."""

    @staticmethod
    def create_reference(config: Config, *, mesh: DataMesh, device: torch.device) -> BuiltModel:
        """The second model of DPO, sharded as the first: `training.ref_model`, or the model as it was before training
        (whatever a checkpoint holds).

        Raises:
            UserError: as `create`.
        """
        with naming_reference(config):
            return ModelFactory.create(reference_config(config), mesh=mesh, device=device)

    @staticmethod
    def create(config: Config, *, mesh: DataMesh, device: torch.device, from_checkpoint: bool = False) -> BuiltModel:
        """Build, shard and fill the model that the configuration names.

        With `init_model_with_meta_device` the model takes no memory until it is sharded, and every rank reads only its
        shards; otherwise every rank builds the whole model in host memory first. Master weights are fp32.

        With `from_checkpoint` the weights are left empty for a checkpoint to fill, whatever the configuration says, so
        that a resumed run needs no more memory than it needs to train; of the weight files only the headers are read.
        Where adapters are trained, a checkpoint has no more than these, and the model's own weights are read as ever.

        Raises:
            UserError: the class does not exist, weights do not fit, a module pattern matches nothing, or see
                `choose_trainable`.
        """
        source_config = load_model_config(config.model)
        model_config = copy.deepcopy(source_config)
        model_config.use_cache = False  # a cache of keys and values is for generation; training would only fill it
        from_meta = config.model.init_model_with_meta_device or from_checkpoint
        model, source_dtypes = (
            _build_on_meta(config, model_config) if from_meta else _build_on_host(config, model_config)
        )
        for line in apply_fused_operators(model, config.optimization):
            logger.info(line)
        weights = _weight_map(config.model, model) if from_meta and not config.model.train_from_scratch else None
        adapter = choose_trainable(model, config.model)
        sharded = parallelize(model, mesh=mesh, config=config.parallel)
        if from_meta:
            model.to_empty(device=device)
            model.tie_weights()
            if weights is not None:
                if adapter is not None or not from_checkpoint:
                    load_weights(model, weights)
                source_dtypes = {name: tensor.dtype for name, tensor in weights.tensors.items()}
            elif not from_checkpoint:
                initialize_weights(model, seed=config.training.seed)
            initialize_computed_buffers(model)
        else:
            model.to(device)
        if adapter is not None and not from_checkpoint:
            from mindspeed_llm.fsdp2.models.adapters import fill_adapters

            fill_adapters(model, config.model, seed=config.training.seed)
        model.generation_config = load_generation_config(config.model, source_config)
        return BuiltModel(
            model=model,
            sharded=sharded,
            source_config=source_config,
            source_dtypes=source_dtypes,
            adapter=adapter,
        )


def load_model_config(config: ModelConfig) -> PretrainedConfig:
    """The model's configuration from its directory (or hub id).

    Raises:
        UserError: config.json is unreadable, of an unknown model type, or of another type than `model.model_id` says.
    """
    source = config.model_name_or_path
    try:
        model_config = AutoConfig.from_pretrained(
            source,
            trust_remote_code=config.trust_remote_code,
            cache_dir=config.cache_dir,
            revision=config.model_revision,
            token=config.hf_hub_token,
        )
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        StrictDataclassError,
    ) as error:
        where = "has no usable config.json"
        if not Path(source).is_dir():
            where = "is no folder here, and as a hub id it could not be fetched"
        raise UserError(f"model.model_name_or_path: {source} {where} ({in_one_line(error)})") from error
    if config.model_id is not None and model_config.model_type != config.model_id:
        raise UserError(
            f"model.model_id: {config.model_id}, but {source}/config.json has model_type {model_config.model_type}; "
            "remove model_id or name the right model"
        )
    return model_config


def build_on_meta(config: Config, model_config: PretrainedConfig, *, experts: str | None = None) -> PreTrainedModel:
    """The model without memory: shapes and names only, fp32.

    `experts` names another implementation of a mixture's experts than the configuration does.
    """
    chosen = _implementations(config, model_config)
    if experts is not None and "experts_implementation" in chosen:
        chosen["experts_implementation"] = experts
    with torch.device("meta"):
        return _from_config(config, model_config, chosen)


def check_weights(config: ModelConfig, model: PreTrainedModel) -> None:
    """Read the headers of the weight files and raise UserError where they do not fit `model` (which may be on meta)."""
    _weight_map(config, model)


def _build_on_meta(config: Config, model_config: PretrainedConfig) -> tuple[PreTrainedModel, dict[str, torch.dtype]]:
    model = build_on_meta(config, model_config)
    check_patterns(model, config.parallel)
    return model, {}


def _build_on_host(config: Config, model_config: PretrainedConfig) -> tuple[PreTrainedModel, dict[str, torch.dtype]]:
    # Mistakes that names and shapes show are told now: reading the weights of a large model takes minutes.
    on_meta, _ = _build_on_meta(config, model_config)
    if config.model.train_from_scratch:
        model = on_meta.to_empty(device="cpu")
        model.tie_weights()
        initialize_weights(model, seed=config.training.seed)
        initialize_computed_buffers(model)
        return model, {}
    # The headers are checked against a meta model first: from_pretrained would fill gaps with random numbers.
    weights = _weight_map(config.model, on_meta)
    model = AutoModelForCausalLM.from_pretrained(
        config.model.model_name_or_path,
        config=model_config,
        dtype=torch.float32,
        trust_remote_code=config.model.trust_remote_code,
        cache_dir=config.model.cache_dir,
        revision=config.model.model_revision,
        token=config.model.hf_hub_token,
        **_implementations(config, model_config),
    )
    return model, {name: tensor.dtype for name, tensor in weights.tensors.items()}


def _from_config(config: Config, model_config: PretrainedConfig, implementations: dict[str, str]) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(
            model_config,
            dtype=torch.float32,
            trust_remote_code=config.model.trust_remote_code,
            **implementations,
        )
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise UserError(
            f"model.model_name_or_path: transformers has no causal language model for {model_config.model_type!r}"
        ) from error


def _implementations(config: Config, model_config: PretrainedConfig) -> dict[str, str]:
    """How attention and, in a mixture of experts, the experts are computed."""
    chosen: dict[str, str] = {}
    model_class = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    if model_class is not None:
        attention = choose_attention(model_config, model_class, use_flash_attn=config.optimization.use_flash_attn)
        if attention is not None:
            chosen["attn_implementation"] = attention
    if model_class is not None and model_class._can_set_experts_implementation():
        chosen["experts_implementation"] = "grouped_mm" if config.optimization.moe_grouped_gemm else "eager"
    return chosen


def load_generation_config(config: ModelConfig, source_config: PretrainedConfig) -> GenerationConfig:
    """The sampling defaults that stand beside the weights, or those that follow from the model's configuration.

    Raises:
        UserError: their file is damaged.
    """
    if (Path(config.model_name_or_path) / "generation_config.json").is_file():
        try:
            return GenerationConfig.from_pretrained(config.model_name_or_path)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{config.model_name_or_path}/generation_config.json cannot be read ({in_one_line(error)}); expected a "
                "JSON object as transformers writes it"
            ) from error
    return GenerationConfig.from_model_config(source_config)


def _weight_map(config: ModelConfig, model: PreTrainedModel) -> ModelWeights:
    return read_weight_map(model, _local_folder(config))


def _local_folder(config: ModelConfig) -> Path:
    folder = Path(config.model_name_or_path)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    folder = Path(
        snapshot_download(
            config.model_name_or_path,
            revision=config.model_revision,
            cache_dir=config.cache_dir,
            token=config.hf_hub_token,
            allow_patterns=["*.json", "*.safetensors", "*.bin"],
        )
    )
    check_no_adapter(folder)  # of a folder on this machine the checks of the configuration have seen it
    return folder
