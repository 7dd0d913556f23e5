"""From the tensors of a checkpoint to a Hugging Face directory, one tensor at a time and without a process group."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.dcp_tensors import CheckpointTensors
from mindspeed_llm.fsdp2.checkpoint.hf_export import plan_export
from mindspeed_llm.fsdp2.checkpoint.hf_names import map_to_model, record_conversions, to_file_layout
from mindspeed_llm.fsdp2.checkpoint.hf_writer import HfWriter, let_generation_stop
from mindspeed_llm.fsdp2.checkpoint.manifest import Manifest, size_text
from mindspeed_llm.fsdp2.checkpoint.train_state import MODEL, check_entries
from mindspeed_llm.fsdp2.checkpoint.weight_files import has_weights, indexed_names, open_weights
from mindspeed_llm.fsdp2.config.adapter_files import replaced_by_export
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.config.model_config import ModelConfig
from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
from mindspeed_llm.fsdp2.distributed.fsdp import DTYPES
from mindspeed_llm.fsdp2.models.model_factory import build_on_meta, load_generation_config, load_model_config
from mindspeed_llm.fsdp2.models.tokenizer import load_tokenizer
from mindspeed_llm.observability.log import get_logger

logger = get_logger(__name__)


@torch.no_grad()
def convert(
    folder: Path,
    manifest: Manifest,
    save_dir: Path,
    *,
    model_configs: Path | None,
    shard_size: int,
    dtype: str | None,
    trust_remote_code: bool,
) -> None:
    """Write the model of the checkpoint `folder`, whose files were checked against `manifest`, to `save_dir`.

    Names, types and accompanying files are those that the run's own export would have had.

    Args:
        model_configs: directory of the source model; None: the one that the run names.
        shard_size: largest weight file in bytes.
        dtype: bf16, fp16 or fp32; None: as the run's own export.
        trust_remote_code: whether the model's own code may run.

    Raises:
        UserError: no usable model directory, the checkpoint belongs to another model, or `save_dir` cannot be written.
        DamagedCheckpoint: the checkpoint is not complete.
    """
    started = time.monotonic()
    _refuse_adapters(folder, manifest)
    model_config = _model_config(manifest, model_configs, trust_remote_code)
    source = Path(model_config.model_name_or_path)
    if source.resolve() in [folder.resolve() for folder in replaced_by_export(save_dir)]:
        raise UserError(
            f"--save-dir: an export to {save_dir} would overwrite the source model {source}; name another folder"
        )
    source_config = load_model_config(model_config)
    # A copy: building a model notes its type and implementations in the configuration.
    run_config = Config(model=model_config, training=TrainingConfig(output_dir=str(save_dir)))
    model = build_on_meta(run_config, copy.deepcopy(source_config))
    stored_dtypes = {} if model_config.train_from_scratch else _follow_source(model, source)

    tensors = CheckpointTensors(folder)
    state = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    wanted = {f"{MODEL}.{name}": tensor for name, tensor in state.items() if name not in tied}
    check_entries(
        wanted,
        tensors.entries,
        source=f"--load-dir: {folder}",
        advice="give the directory of the model that the run was started from as --model-configs",
    )
    _check_files_present(folder, manifest, tensors.files_of(wanted))

    dtype = dtype or manifest.config.get("training", {}).get("hf_export_dtype")
    plan = plan_export(model, state, _dtype_of(dtype, stored_dtypes, source_config))
    generation_config = load_generation_config(model_config, source_config)
    tokenizer = load_tokenizer(model_config)
    let_generation_stop(generation_config, tokenizer.eos_token_id)

    def report(file: str, done: int, total: int) -> None:
        logger.info("Wrote %s (%d of %d, %.1f s)", file, done, total, time.monotonic() - started)

    try:
        with HfWriter(save_dir, plan.files, shard_size, on_file=report) as writer:
            logger.info(
                "Writing %d tensors (%s) to %d files",
                len(plan.files),
                size_text(writer.plan.total_size),
                len(writer.plan.files),
            )
            for group in plan.groups:
                full = {name: tensors.read(f"{MODEL}.{name}", plan.dtypes[name]) for name in group}
                writer.add(to_file_layout(model, full))
            writer.write_configs(
                model,
                source_config,
                generation_config=generation_config,
                dtype=plan.config_dtype,
                save_tokenizer=tokenizer.save_pretrained,
            )
            writer.publish()
    except OSError as error:
        raise UserError(f"--save-dir: {save_dir} cannot be written ({error}); nothing was left there") from error
    logger.info("Model of step %d in Hugging Face format: %s", manifest.step, save_dir)


def _refuse_adapters(folder: Path, manifest: Manifest) -> None:
    model = manifest.config.get("model", {})
    if model.get("lora_rank") is not None or model.get("adapter_name_or_path") is not None:
        raise UserError(
            f"--load-dir: {folder} holds adapters and no model. Start train_fsdp2.py with the run's file, a new "
            f"--training.output_dir, --training.resume_from_checkpoint {folder} --training.max_steps {manifest.step} "
            "--training.merge_adapter true: it exports the adapter and the merged model, and trains no further"
        )


def _model_config(manifest: Manifest, model_configs: Path | None, trust_remote_code: bool) -> ModelConfig:
    """The run's `model` section with the directory that serves now."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    values = {name: value for name, value in manifest.config.get("model", {}).items() if name in known}
    named_by = "--model-configs"
    if model_configs is not None:
        values |= {"model_name_or_path": str(model_configs)}
        tokenizer = values.get("tokenizer_name_or_path")
        if tokenizer is not None and not Path(tokenizer).is_dir():
            values["tokenizer_name_or_path"] = None
            logger.info("The tokenizer of the run, %s, is not here: taken from %s", tokenizer, model_configs)
    elif "model_name_or_path" in values:
        named_by = "the model.model_name_or_path of the run"
        values["model_name_or_path"] = str(_local_folder(values["model_name_or_path"], values))
    source = values.get("model_name_or_path")
    if source is None or not (Path(source) / "config.json").is_file():
        raise UserError(
            f"{named_by}: {source} has no config.json; give the directory of the model that the run was started from "
            "as --model-configs"
        )
    return ModelConfig(**{**values, "trust_remote_code": trust_remote_code})


def _local_folder(name: str, values: dict) -> str:
    """Where a model lies: `name` itself, or for a hub id what the run has downloaded; nothing is downloaded here."""
    if Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            name, revision=values.get("model_revision"), cache_dir=values.get("cache_dir"), local_files_only=True
        )
    except (OSError, ValueError):  # neither cached nor a possible id: the caller says what is missing
        return name


def _follow_source(model: PreTrainedModel, source: Path) -> dict[str, torch.dtype]:
    """Note on `model` how the names of the source's files become the model's; returns the types in those files."""
    if has_weights(source):
        weights = map_to_model(model, open_weights(source))
        return {name: tensor.dtype for name, tensor in weights.tensors.items()}
    if names := indexed_names(source):
        logger.info("%s has an index without weights: names as there, types as config.json says", source)
        record_conversions(model, names)
    return {}


def _dtype_of(
    chosen: str | None, stored: dict[str, torch.dtype], config: PretrainedConfig
) -> Callable[[str], torch.dtype]:
    if chosen is not None:
        return lambda name: DTYPES[chosen]
    default = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return lambda name: stored.get(name, default)


def _check_files_present(folder: Path, manifest: Manifest, needed: list[str]) -> None:
    missing = [file for file in needed if not (folder / file).exists()]
    if missing:
        raise UserError(
            f"--load-dir: {folder} lacks {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''} "
            f"({len(missing)} of {len(needed)} files with weights), which other nodes have written to disks of their "
            "own; copy these files into one directory"
        )
    unlisted = [file for file in needed if file not in manifest.files]
    if unlisted:
        logger.warning(
            "%d files come from other nodes: the manifest of this one has no hashes to check them with", len(unlisted)
        )
