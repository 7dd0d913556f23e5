"""LoRA adapters, through PEFT: where they go, their first values, and switching them off."""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.adapter_names import ADAPTER, BASE, is_adapter, name_in_file
from mindspeed_llm.fsdp2.checkpoint.weight_files import LazyTensor, open_file
from mindspeed_llm.fsdp2.config.adapter_files import FIELD, WEIGHTS, read_adapter_config
from mindspeed_llm.fsdp2.config.model_config import ModelConfig
from mindspeed_llm.fsdp2.config.types import comma_list
from mindspeed_llm.fsdp2.models.initialize import local_slices, local_tensor

ALL = "all"
_FOR_ONE_OF_BOTH = (
    "the output head, which is the input embedding too (tie_word_embeddings): an adapter would be for one of both "
    "only. Leave it out"
)


def add_adapters(model: PreTrainedModel, config: ModelConfig) -> LoraConfig:
    """Put adapters into `model` and freeze the rest; see `choose_trainable`."""
    lora = _given(config) if config.adapter_name_or_path else _chosen(model, config)
    folder = Path(config.model_name_or_path)
    # The adapter is loaded from other folders than the one that this run was started in.
    lora.base_model_name_or_path = str(folder.absolute()) if folder.is_dir() else config.model_name_or_path
    is_meta = next(model.parameters()).is_meta
    try:
        inject_adapter_in_model(lora, model, adapter_name=ADAPTER, low_cpu_mem_usage=is_meta)
    except ValueError as error:  # its targets are not in this model, or no layers that can have adapters
        raise UserError(f"{_source(config)} does not fit {type(model).__name__}: {error}") from error
    if isinstance(model.get_output_embeddings(), LoraLayer) and _ties_head(model):
        raise UserError(f"{_source(config)}: among its targets is {_FOR_ONE_OF_BOTH}")
    adapters = [name for name, _ in model.named_parameters() if is_adapter(name)]
    others = [name for name, parameter in model.named_parameters() if parameter.requires_grad and not is_adapter(name)]
    if others or not adapters:
        raise UserError(
            f"{_source(config)} does not fit {type(model).__name__}: "
            + (f"PEFT made {others[0]}, which is no LoRA on a linear layer" if others else "no layer got an adapter")
        )
    if config.adapter_name_or_path:
        _stored(model, config.adapter_name_or_path)
    return lora


@torch.no_grad()
def fill_adapters(model: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Give adapters their values, from the files that `config` names, or as PEFT begins: A uniform within
    +-1 / sqrt(inputs), B zero, so that the model computes what it did before.

    The draw depends on (seed, name) alone, so that every topology starts from the same adapters.

    Raises:
        UserError: the files hold NaN or infinity in what this rank keeps.
    """
    stored = _stored(model, config.adapter_name_or_path) if config.adapter_name_or_path else None
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        index, local = local_slices(parameter), local_tensor(parameter)
        if not local.numel():
            continue
        if stored is not None:
            values = stored[name].read(index)
            if not torch.isfinite(values).all():
                raise UserError(
                    f"{FIELD} = {config.adapter_name_or_path!r}: {WEIGHTS} holds NaN or infinity, in "
                    f"{name_in_file(name)} first: the training that wrote it has failed, or the file is damaged. Name "
                    "another adapter, or copy this one again"
                )
            local.copy_(values)
        elif ".lora_B." in name:
            local.zero_()
        else:
            generator = torch.Generator().manual_seed((seed + zlib.crc32(name.encode())) % 2**63)
            bound = parameter.shape[1] ** -0.5
            local.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)[index])


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let the model compute as it did without adapters."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert layers, "the model has no adapters"
    # PEFT's own switch also turns `requires_grad` on and off, which sharded parameters must keep.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _given(config: ModelConfig) -> LoraConfig:
    assert config.adapter_name_or_path is not None
    read_adapter_config(config.adapter_name_or_path)
    lora = LoraConfig.from_pretrained(config.adapter_name_or_path)
    lora.inference_mode, lora.lora_dropout = False, config.lora_dropout
    return lora


def _chosen(model: PreTrainedModel, config: ModelConfig) -> LoraConfig:
    assert config.lora_rank is not None
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.chosen_alpha,  # type: ignore[arg-type]  # PEFT calculates with any number
        lora_dropout=config.lora_dropout,
        target_modules=lora_targets(model, config.lora_target),
        task_type="CAUSAL_LM",
    )


def lora_targets(model: PreTrainedModel, text: str) -> list[str]:
    """The `target_modules` of adapter_config.json for `model.lora_target`.

    Raises:
        UserError: a name that matches no linear layer, another kind of module, or a head that is tied to the embedding.
    """
    modules = dict(model.named_modules())
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    head = model.get_output_embeddings()
    heads = {name for name in linear if modules[name] is head}
    if text.strip() == ALL:
        targets = {name.rpartition(".")[2] for name in linear - heads}
        if any(_matches(name, target) for name in heads for target in targets):
            targets = linear - heads
        if not targets:
            raise UserError(f"model.lora_target = all: {type(model).__name__} has no linear layers but the output head")
        return sorted(targets)
    targets = set(comma_list(text))
    for target in targets:
        found = [name for name in modules if _matches(name, target)]
        names = {name.rpartition(".")[2] for name in (linear - heads if _ties_head(model) else linear)}
        near = sorted(difflib.get_close_matches(target, sorted(names), cutoff=0.0))
        expected = f"expected names of linear layers, such as {', '.join(near)}, or all"
        if not found:
            raise UserError(f"model.lora_target: {target!r} matches no module of {type(model).__name__}; {expected}")
        if other := [name for name in found if name not in linear]:
            raise UserError(
                f"model.lora_target: {target!r} matches {other[0]}, which is no linear layer "
                f"({type(modules[other[0]]).__name__}); {expected}"
            )
        if heads.intersection(found) and _ties_head(model):
            raise UserError(f"model.lora_target: {target!r} is {_FOR_ONE_OF_BOTH}")
    return sorted(targets)


def _ties_head(model: PreTrainedModel) -> bool:
    return model.config.get_text_config().tie_word_embeddings


def _matches(name: str, target: str) -> bool:
    """PEFT's own rule."""
    return name == target or name.endswith(f".{target}")


def _source(config: ModelConfig) -> str:
    return f"{FIELD} = {config.adapter_name_or_path!r}" if config.adapter_name_or_path else "model.lora_target"


def _stored(model: nn.Module, folder: str) -> dict[str, LazyTensor]:
    """The tensors of an adapter's file by the model's names; headers only.

    Raises:
        UserError: names or shapes are not those of the adapters that the model has.
    """
    path = Path(folder) / WEIGHTS
    found = open_file(path)
    wanted = {name_in_file(name): (name, p) for name, p in model.named_parameters() if is_adapter(name)}
    missing, spare = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    weights = [name for name in spare if BASE in name]
    if weights and not missing:
        raise UserError(
            f"{FIELD}: {path} holds weights of the model beside the adapter ({', '.join(weights[:3])}), which would be "
            "left out. Save it with PEFT's save_pretrained(..., save_embedding_layers=False)"
        )
    if missing or spare:
        parts = [f"{len(missing)} tensors are not in it ({', '.join(missing[:3])})"] if missing else []
        parts += [f"{len(spare)} of its tensors have no place ({', '.join(spare[:3])})"] if spare else []
        raise UserError(
            f"{FIELD}: {path} is an adapter for another model: {'; '.join(parts)}. Name the model that it was made for "
            "as model.model_name_or_path, or another adapter"
        )
    for stored_name, (_, parameter) in wanted.items():
        if tuple(found[stored_name].shape) != tuple(parameter.shape):
            raise UserError(
                f"{FIELD}: {path} is an adapter for another model: {stored_name} has shape "
                f"{list(found[stored_name].shape)} instead of {list(parameter.shape)}"
            )
    return {name: found[stored_name] for stored_name, (name, _) in wanted.items()}
