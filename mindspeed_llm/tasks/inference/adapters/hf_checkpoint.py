"""A model from a checkpoint of the FSDP2 backend, without an export in between. Nothing in it is unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.platform import distributed
from mindspeed_llm.tasks.inference.adapters.hf_build import Asked, fill, load_whole, merge_adapters, on_meta
from mindspeed_llm.tasks.inference.adapters.hf_files import naming

if TYPE_CHECKING:
    from mindspeed_llm.fsdp2.checkpoint.manifest import Manifest
    from mindspeed_llm.fsdp2.config.model_config import ModelConfig

logger = get_logger(__name__)


def load_checkpoint(folder: Path, base_model: Path | None, asked: Asked) -> tuple[PreTrainedModel, Path]:
    """The model as it was when the checkpoint `folder` was written, and the folder of the run's tokenizer.

    Configuration and tokenizer (and where adapters are trained, the model's own weights) are those of `base_model`,
    else of the model that the run was started from.

    Raises:
        UserError: the checkpoint is damaged or belongs to another model, or that model is not here.
    """
    from mindspeed_llm.checkpoints.files import DamagedCheckpoint
    from mindspeed_llm.fsdp2.checkpoint.manifest import read_manifest

    try:
        manifest = read_manifest(folder)
        _check_files(folder, manifest)
        named = _model_of_run(folder, manifest, base_model, asked)
        has_adapters = manifest.adapter is not None
        flag = "the model of the run" if base_model is None else "--base-model"
        with naming(flag):
            model = (
                _load_adapters(folder, manifest, named, asked) if has_adapters else _load_model(folder, named, asked)
            )
    except DamagedCheckpoint as damage:
        raise UserError(f"--load {folder} is damaged: {damage}; name another checkpoint of the run") from damage
    tokenizer = Path(named.tokenizer_name_or_path or named.model_name_or_path)
    if named.add_tokens or named.add_special_tokens:
        logger.warning(
            "The run added tokens to the tokenizer of %s, which are not in that folder; name the tokenizer of an "
            "export of the run with --tokenizer-name-or-path",
            tokenizer,
        )
    return model, cached_folder(str(tokenizer))


def cached_folder(name: str) -> Path:
    """Where a model lies that files name: the folder itself, or what was fetched for a hub id earlier. Nothing is
    fetched here, since nobody has asked for it.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # neither cached nor a possible id: the caller says what is missing
        return Path(name)


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Compare all files with their hashes, each rank a share of them (a collective)."""
    from mindspeed_llm.fsdp2.checkpoint import manifest as layout

    world, rank = distributed.world_size(), distributed.rank()
    if world == 1:
        layout.check_files(folder, manifest)
        return
    problem = None
    try:
        layout.check_files(folder, manifest, sorted(manifest.files)[rank::world])
    except layout.DamagedCheckpoint as damage:
        problem = str(damage)
    problems: list[str | None] = [None] * world
    torch.distributed.all_gather_object(problems, problem)
    if found := [text for text in problems if text is not None]:
        raise layout.DamagedCheckpoint(found[0])


def _model_of_run(folder: Path, manifest: Manifest, base_model: Path | None, asked: Asked) -> ModelConfig:
    """The run's `model` section with the directory that serves now."""
    import dataclasses

    from mindspeed_llm.fsdp2.config.model_config import ModelConfig

    known = {field.name for field in dataclasses.fields(ModelConfig)}
    values = {name: value for name, value in manifest.config.get("model", {}).items() if name in known}
    said = values.get("model_name_or_path", "")
    source = cached_folder(said) if base_model is None else base_model
    if not (source / "config.json").is_file():
        if base_model is not None:
            raise UserError(f"--base-model {base_model} has no config.json; expected a Hugging Face model directory")
        raise UserError(
            f"--load {folder}: its run was started from the model {said}, which is not here (no config.json); give the "
            "directory of that model with --base-model"
        )
    values |= {"model_name_or_path": str(source), "trust_remote_code": asked.trust_remote_code}
    values |= {"lora_rank": None, "adapter_name_or_path": None, "freeze_modules": []}
    tokenizer = values.get("tokenizer_name_or_path")
    if tokenizer is not None and not cached_folder(tokenizer).is_dir():
        logger.info("The tokenizer of the run, %s, is not here: taken from %s", tokenizer, source)
        values["tokenizer_name_or_path"] = None
    return ModelConfig(**values)


def _load_model(folder: Path, named: ModelConfig, asked: Asked) -> PreTrainedModel:
    from mindspeed_llm.fsdp2.checkpoint.train_state import model_tensors
    from mindspeed_llm.fsdp2.models.model_factory import load_generation_config, load_model_config

    config = load_model_config(named)
    model = on_meta(named, config)
    fill(model, asked.chosen_dtype(config), asked, lambda: _read(model_tensors(model), folder))
    model.generation_config = load_generation_config(named, config)
    return model


def _load_adapters(folder: Path, manifest: Manifest, named: ModelConfig, asked: Asked) -> PreTrainedModel:
    from mindspeed_llm.fsdp2.checkpoint.hf_load import load_weights, read_weight_map
    from mindspeed_llm.fsdp2.checkpoint.train_state import model_tensors
    from mindspeed_llm.fsdp2.config.model_files import check_model_files
    from mindspeed_llm.fsdp2.models.model_factory import load_generation_config, load_model_config
    from mindspeed_llm.tasks.inference.adapters.hf_build import prepare_adapters

    check_model_files(named)
    _check_base(folder, manifest, named)
    if not asked.shard:
        model = load_whole(named, asked)
        _add_adapters(model, folder, manifest)
        prepare_adapters(model)
        _read(model_tensors(model), folder)
        return merge_adapters(model)
    config = load_model_config(named)
    model = on_meta(named, config)
    weights = read_weight_map(model, Path(named.model_name_or_path))
    _add_adapters(model, folder, manifest)

    def read() -> None:
        load_weights(model, weights)
        _read(model_tensors(model), folder)

    fill(model, asked.chosen_dtype(config), asked, read)
    model.generation_config = load_generation_config(named, config)
    return model


def _check_base(folder: Path, manifest: Manifest, named: ModelConfig) -> None:
    """Adapters have no meaning on other weights than those that they were trained for."""
    from mindspeed_llm.fsdp2.config.adapter_files import BASE
    from mindspeed_llm.fsdp2.config.weight_layout import fingerprint, weight_files

    expected = (manifest.adapter or {}).get(BASE)
    if expected is not None and fingerprint(weight_files(Path(named.model_name_or_path))) != expected:
        raise UserError(
            f"--load {folder} holds adapters, and {named.model_name_or_path} has other weights than the model that "
            "they were trained for; name that model with --base-model"
        )


def _add_adapters(model: PreTrainedModel, folder: Path, manifest: Manifest) -> None:
    """Put adapters into `model` where the checkpoint has some."""
    from peft import LoraConfig, inject_adapter_in_model

    from mindspeed_llm.checkpoints.dcp_reader import read_metadata, tensor_entries
    from mindspeed_llm.fsdp2.checkpoint.adapter_names import ADAPTER
    from mindspeed_llm.fsdp2.checkpoint.train_state import MODEL
    from mindspeed_llm.fsdp2.config.adapter_files import BASE

    prefix, suffix = f"{MODEL}.", f".lora_A.{ADAPTER}.weight"
    names = [name for name in tensor_entries(read_metadata(folder), folder) if name.startswith(prefix)]
    targets = [name.removeprefix(prefix).removesuffix(suffix) for name in names if name.endswith(suffix)]
    modules = {name for name, _ in model.named_modules()}
    if unknown := sorted(set(targets) - modules):
        raise UserError(
            f"--load {folder} has adapters for {unknown[0]}, which {type(model).__name__} has not; name the model that "
            "they were trained for with --base-model"
        )
    scale = {name: value for name, value in (manifest.adapter or {}).items() if name != BASE}
    config = LoraConfig(target_modules=targets, task_type="CAUSAL_LM", inference_mode=True, **scale)
    is_meta = next(model.parameters()).is_meta
    inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=is_meta)


def _read(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Fill tensors, whole or sharded, from the checkpoint: each rank reads what it keeps (a collective, if sharded)."""
    from torch.distributed.tensor import DTensor

    from mindspeed_llm.checkpoints.dcp_reader import read_metadata, tensor_entries
    from mindspeed_llm.checkpoints.storage import CheckpointError, open_storage_for_reading
    from mindspeed_llm.fsdp2.checkpoint.dcp_tensors import CheckpointTensors
    from mindspeed_llm.fsdp2.checkpoint.tensor_files import read_tensors
    from mindspeed_llm.fsdp2.checkpoint.train_state import check_entries

    check_entries(
        tensors,
        tensor_entries(read_metadata(folder), folder),
        source=f"--load {folder}",
        advice="name the model that the run was started from with --base-model",
    )
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        storage = open_storage_for_reading(folder, distributed.new_host_group())
        try:
            read_tensors(dict(tensors), folder, storage)
        except CheckpointError as error:
            raise UserError(f"--load {folder}: {error}; name another checkpoint of the run") from error
        return
    stored = CheckpointTensors(folder)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(stored.read(name, tensor.dtype))
