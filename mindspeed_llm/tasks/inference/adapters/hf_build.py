"""A transformers model with its weights: whole on this device, or this rank's shard of it."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mindspeed_llm.errors import UserError, in_one_line
from mindspeed_llm.platform import distributed

if TYPE_CHECKING:
    from mindspeed_llm.fsdp2.config.model_config import ModelConfig

DType = Literal["auto", "fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FOUND_BY_TRANSFORMERS = tuple(
    f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")
)

_LOOKS_BOTH_WAYS: dict[str, tuple[object, ...]] = {
    "is_causal": (False,),
    "use_bidirectional_attention": (True, "all"),
}
"""Fields of configurations -> the values of models that are not causal. "vision" is about images only."""
_PERMUTED = ("xlnet",)
"""Types that predict tokens in any order: without a mask that generation makes for them, each sees all others."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How a model is to be held."""

    dtype: DType
    device: torch.device
    shard: bool
    trust_remote_code: bool

    def chosen_dtype(self, config: PretrainedConfig) -> torch.dtype:
        """See `hf_load.load_hf`."""
        if self.dtype != "auto":
            return _DTYPES[self.dtype]
        if self.device.type == "cpu":
            return torch.float32
        said = config.get_text_config().dtype
        return said if said in _NAMES else torch.bfloat16


def load_whole(named: ModelConfig, asked: Asked) -> PreTrainedModel:
    """The model that `named` has the folder of, as transformers loads it.

    Raises:
        UserError: config.json is unusable, or the weights are damaged or do not fit it.
    """
    from mindspeed_llm.fsdp2.models.model_factory import check_weights, load_model_config

    if not any((Path(named.model_name_or_path) / name).is_file() for name in _FOUND_BY_TRANSFORMERS):
        return build_from_files(dataclasses.replace(named, adapter_name_or_path=None), asked)
    config = load_model_config(named)
    if getattr(config, "quantization_config", None) is None:
        check_weights(named, on_meta(named, config))  # transformers would fill gaps with random numbers
    model = AutoModelForCausalLM.from_pretrained(
        named.model_name_or_path,
        config=config,
        dtype=asked.chosen_dtype(config),
        trust_remote_code=asked.trust_remote_code,
    )
    return model.to(asked.device)


def build_from_files(named: ModelConfig, asked: Asked) -> PreTrainedModel:
    """The model of `named`, with the plain LoRA that it may have, on this device or spread over all ranks: each
    reads what it keeps.
    """
    from mindspeed_llm.fsdp2.checkpoint.hf_load import read_weight_map
    from mindspeed_llm.fsdp2.models.adapters import add_adapters, fill_adapters
    from mindspeed_llm.fsdp2.models.model_factory import load_model_config

    config = load_model_config(named)
    model = on_meta(named, config)
    weights = read_weight_map(model, Path(named.model_name_or_path))
    if named.has_adapters:
        add_adapters(model, named)
    fill(model, asked.chosen_dtype(config), asked, lambda: _load(model, weights))
    if named.has_adapters:
        fill_adapters(model, named, seed=0)
    return model


def _load(model: PreTrainedModel, weights: object) -> None:
    from mindspeed_llm.fsdp2.checkpoint.hf_load import load_weights

    load_weights(model, weights)  # type: ignore[arg-type]


def on_meta(named: ModelConfig, config: PretrainedConfig) -> PreTrainedModel:
    """The model without memory, fp32.

    Raises:
        UserError: config.json describes none that transformers can build, or one that is not causal.
    """
    from mindspeed_llm.fsdp2.config.config import Config
    from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
    from mindspeed_llm.fsdp2.models.model_factory import build_on_meta

    # A copy: building a model notes its type and implementations in the configuration.
    run = Config(model=named, training=TrainingConfig(output_dir=""))
    file = Path(named.model_name_or_path) / "config.json"
    try:
        model = build_on_meta(run, copy.deepcopy(config))
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, ArithmeticError, RuntimeError) as error:
        raise UserError(
            f"{file}: transformers cannot build the model of type {config.model_type!r} that it describes "
            f"({type(error).__name__}: {in_one_line(error)}); copy the file of the model again"
        ) from error
    if reason := _why_not_causal(model):
        raise UserError(
            f"{file}: {reason}: {type(model).__name__} then computes each token from those behind it, too, and cannot "
            "continue texts; expected a causal language model"
        )
    return model


def _why_not_causal(model: PreTrainedModel) -> str | None:
    """What of the configuration lets tokens see later ones; None of a causal language model.

    Encoders that transformers also offers as language models, such as BERT, say in their layers whether they are used
    as decoders; other models do not have that attribute, whatever their configuration says.
    """
    config = model.config.get_text_config()
    if config.model_type in _PERMUTED:
        return f"model_type {config.model_type!r}"
    for name, values in _LOOKS_BOTH_WAYS.items():
        if (value := getattr(config, name, None)) in values:
            return f"{name} {json.dumps(value)}"
    # Beside the decoder there may be an encoder, of images for example.
    decoder = model.get_decoder() or model
    modules = [module for module in decoder.modules() if isinstance(getattr(module, "is_decoder", None), bool)]
    if any(not module.is_decoder and not getattr(module, "causal", False) for module in modules):
        return "causal false" if hasattr(config, "causal") else "is_decoder false"
    return None


def fill(model: PreTrainedModel, dtype: torch.dtype, asked: Asked, read: Callable[[], None]) -> None:
    """Give a model on meta its memory on the device, or this rank's part, and let `read` fill its state."""
    from mindspeed_llm.fsdp2.models.initialize import initialize_computed_buffers

    _cast(model, dtype, with_exceptions=not asked.shard)
    if asked.shard:
        _shard(model, dtype)
    model.to_empty(device=asked.device)
    model.tie_weights()
    read()
    initialize_computed_buffers(model)


def _cast(model: PreTrainedModel, dtype: torch.dtype, *, with_exceptions: bool) -> None:
    """Parameters only: buffers such as the frequencies of rotary positions need their precision.

    `with_exceptions`: leave in fp32 what the model's class says (a unit of sharding has one dtype only).
    """
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 and with_exceptions else set()
    if dtype == torch.float16 and with_exceptions:
        kept |= set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _shard(model: PreTrainedModel, dtype: torch.dtype) -> None:
    from mindspeed_llm.fsdp2.config.parallel_config import ParallelConfig
    from mindspeed_llm.fsdp2.distributed.mesh import build_mesh
    from mindspeed_llm.fsdp2.distributed.parallelize import parallelize

    world = distributed.world_size()
    config = ParallelConfig(param_dtype=_NAMES[dtype], fsdp_modules=_units(model))
    parallelize(model, mesh=build_mesh(world_size=world, fsdp_size=world), config=config)


def _units(model: PreTrainedModel) -> list[str]:
    """Patterns of the layers, the embedding and the output head."""
    layers = model.config.get_text_config().num_hidden_layers
    names, ends = [], (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        is_inside = any(name.startswith(other.removesuffix("{*}")) for other in names)
        if isinstance(module, nn.ModuleList) and len(module) == layers and not is_inside:
            names.append(f"{name}.{{*}}")
        elif any(module is end for end in ends):
            names.append(name)
    return names


def prepare_adapters(model: PreTrainedModel) -> None:
    """Hold the small matrices of adapters in fp32, so that merging rounds once."""
    from mindspeed_llm.fsdp2.checkpoint.adapter_names import is_adapter

    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


@torch.no_grad()
def merge_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Add the plain LoRA of a whole model to its weights, so that it costs nothing any more; its layers become what
    they were before.
    """
    from peft.tuners.lora import LoraLayer

    from mindspeed_llm.fsdp2.checkpoint.adapter_export import adapter_changes

    changes = adapter_changes(model)
    for name, module in list(model.named_modules()):
        if not isinstance(module, LoraLayer):
            continue
        layer = module.get_base_layer()
        layer.weight.copy_(layer.weight.float() + changes[f"{name}.weight"]())
        model.set_submodule(name, layer)
    model._hf_peft_config_loaded = False
    return model
