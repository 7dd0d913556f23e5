"""Settings of a resumed run against those of the run that wrote the checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.manifest import DamagedCheckpoint, Manifest, find_checkpoints, read_manifest
from mindspeed_llm.fsdp2.checkpoint.resume_source import LATEST
from mindspeed_llm.fsdp2.config.adapter_files import BASE, adapter_scale, base_fingerprint
from mindspeed_llm.fsdp2.config.config import SECRETS, Config, resolved_dict
from mindspeed_llm.fsdp2.config.fields import all_fields
from mindspeed_llm.fsdp2.config.help import shown
from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
from mindspeed_llm.fsdp2.config.types import comma_list
from mindspeed_llm.fsdp2.data.sources import TrainSource

# They decide where a run writes and what it shows, and not what it computes.
_NO_MATTER = frozenset(
    f"training.{name}"
    for name in (
        "output_dir",
        "resume_from_checkpoint",
        "hf_export_dtype",
        "hf_shard_size",
        "log_throughput",
        "log_cpu_memory",
        "logging_steps",
        "tensorboard",
        "device_peak_tflops",
        "stop_on_nonfinite_loss",
    )
)
_NO_MATTER_BEGINNINGS = ("training.save_", "training.profile", "training.eval_samples", "inference.")
_SCHEDULE = tuple(
    f"training.{name}"
    for name in ("max_steps", "num_train_epochs", "lr", "min_lr", "warmup_ratio", "lr_scheduler_type")
)
# The place of a sample in the data of the one is no place in that of the other.
_DATA_KINDS = ("training.stage", "data.data_manager_type", "data.streaming")
_MODEL = "model.model_name_or_path"
_TARGET = "model.lora_target"
_SOURCES = {"model.lora_rank", "model.adapter_name_or_path"}
_WHAT_TO_DO = (
    "to train the weights further with it, start anew from the exported model (model.model_name_or_path), with another "
    "training.output_dir and without resume_from_checkpoint"
)


def check_planned_resume(config: Config) -> str | None:
    """As `check_settings`, for the checkpoint that a run would resume from, which is not read itself: for --check.

    Raises:
        UserError: see `check_settings`.
    """
    wanted = config.training.resume_from_checkpoint
    if wanted is None:
        return None
    found = [path for _, path in find_checkpoints(Path(config.training.output_dir))] if wanted == LATEST else []
    for folder in [Path(wanted)] if wanted != LATEST else reversed(found):
        try:
            manifest = read_manifest(folder)
        except DamagedCheckpoint:
            continue
        return check_settings(manifest, config)
    return None


def check_settings(manifest: Manifest, config: Config) -> str | None:
    """The line to log about settings that have changed since the checkpoint, or None. Of a run that takes no more than
    weights from it, this is about the model that adapters are for.

    Raises:
        UserError: it holds adapters and the run trains none, or the reverse; adapters would count otherwise than they
            did, or be on other layers; a run that goes on would put them on another model; the checkpoint's position
            has no meaning in data of another kind, or lies beyond max_steps.
    """
    # As JSON has it, which the manifest went through.
    old, new = _flat(manifest.config), _flat(json.loads(json.dumps(resolved_dict(config))))
    _check_what_is_trained(manifest, config, old)
    _check_adapter(manifest, config)
    if not manifest.has_optimizer:
        was, now = old.get(_MODEL), new[_MODEL]
        if manifest.adapter is None or was == now:
            return None
        return f"the checkpoint's adapters were trained for {_MODEL} = {shown(was)}, and are put on {shown(now)}"
    for key in _DATA_KINDS:
        before = old.get(key, all_fields()[key].default)
        if before != new[key]:
            raise UserError(
                f"{key} = {shown(new[key])}, but the checkpoint of step {manifest.step} was written with "
                f"{shown(before)}: its place in the data cannot be taken over. Set it back; {_WHAT_TO_DO}"
            )
    if 0 < config.training.max_steps < manifest.step:
        raise UserError(
            f"training.max_steps = {config.training.max_steps} lies before the checkpoint, which was written after "
            f"step {manifest.step}: raise it, or resume from an earlier checkpoint"
        )
    changed = {
        key: f"{key} {shown(old[key])} -> {shown(new[key])}"
        for key in all_fields()
        if key in old and old[key] != new[key] and _matters(key)
    }
    if not changed:
        return None
    line = f"settings that differ from the checkpoint's: {', '.join(changed.values())}"
    bent = [key for key in _SCHEDULE if key in changed]
    if bent:
        line += (
            f"; {', '.join(bent)} decide the course of the learning rate, which does not go on from step "
            f"{manifest.step} as it was begun"
        )
    return line


def _check_what_is_trained(manifest: Manifest, config: Config, old: dict[str, Any]) -> None:
    """Adapters or the model, and which layers have adapters, as far as the settings alone tell."""
    step, model = manifest.step, config.model
    if not _SOURCES & old.keys():
        return  # the manifest does not say
    had = next((key for key in sorted(_SOURCES) if old.get(key) is not None), None)
    if had is None and model.has_adapters:
        field = "lora_rank" if model.lora_rank is not None else "adapter_name_or_path"
        raise UserError(
            f"model.{field} = {shown(getattr(model, field))} trains adapters, but the checkpoint of step {step} holds "
            f"the whole model. Leave {field} out; to train adapters for that model, start anew from its export "
            f"({_MODEL}), without resume_from_checkpoint"
        )
    if had is not None and not model.has_adapters:
        raise UserError(
            f"model.lora_rank is not set, but the checkpoint of step {step} holds adapters, which were trained with "
            f"{had} = {shown(old[had])}. Set {had} as it was; to train the whole model, start anew with another "
            "training.output_dir and without resume_from_checkpoint"
        )
    if had == "model.lora_rank" and model.adapter_name_or_path is None:
        before, now = (set(comma_list(text)) for text in (old.get(_TARGET, "all"), model.lora_target))
        if "all" not in before | now and not (_are_in(before, now) and _are_in(now, before)):
            raise UserError(
                f"{_TARGET} = {shown(model.lora_target)}, but the checkpoint of step {step} has adapters on "
                f"{shown(old[_TARGET])}. Set it back; to train others, start anew without resume_from_checkpoint"
            )


def _are_in(some: set[str], others: set[str]) -> bool:
    """Whether each name may stand for a layer that `others` has too: the same, or with more or fewer words before."""
    return all(any(f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}") for b in others) for a in some)


def _check_adapter(manifest: Manifest, config: Config) -> None:
    before, now = manifest.adapter, adapter_scale(config.model)
    if before is None or now is None:
        return  # where only one has adapters, `_check_what_is_trained` or names of tensors tell
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        source = "adapter_name_or_path" if config.model.adapter_name_or_path is not None else "lora_rank"
        was, has = (", ".join(f"{name} {numbers.get(name)}" for name in changed) for numbers in (before, now))
        raise UserError(
            f"model.{source} = {shown(getattr(config.model, source))} gives adapters of {has}, but those in the "
            f"checkpoint of step {manifest.step} were trained with {was}: they would change the model otherwise than "
            "they did. Set model.lora_rank, model.lora_alpha or model.adapter_name_or_path back"
        )
    if not manifest.has_optimizer or before.get(BASE) is None:
        return  # weights alone may start anywhere, which is said
    fingerprint = base_fingerprint(config.model)
    if fingerprint is not None and fingerprint != before[BASE]:
        raise UserError(
            f"{_MODEL} = {shown(config.model.model_name_or_path)} has other weights than the model that the adapters "
            f"in the checkpoint of step {manifest.step} were trained for ({_MODEL} = "
            f"{shown(manifest.config.get('model', {}).get('model_name_or_path'))} then). Name that model; to train the "
            "adapters further on this one, start anew from the exported adapter (model.adapter_name_or_path), with "
            "another training.output_dir and without resume_from_checkpoint"
        )


def check_data_length(manifest: Manifest, data: TrainSource, training: TrainingConfig) -> None:
    """Compare the data of the run with what the checkpoint's position refers to.

    Raises:
        UserError: an epoch has another number of samples, or the run would end before the checkpoint.
    """
    before, taken = manifest.progress.get("num_samples"), manifest.progress["samples"]
    # A stream has no epochs: what it calls one is as long as the run.
    if before is not None and before != data.num_samples and not manifest.config["data"]["streaming"]:
        raise UserError(
            f"data.dataset: an epoch has {data.num_samples} training samples, but had {before} when the checkpoint of "
            f"step {manifest.step} was written: its place in the data cannot be taken over. Set the data fields back "
            f"(dataset, cutoff_len, packing, max_samples, val_size, split); {_WHAT_TO_DO}"
        )
    in_all = math.floor(data.num_samples * training.num_train_epochs + 1e-6)
    if training.max_steps <= 0 and in_all < taken:
        raise UserError(
            f"training.num_train_epochs = {training.num_train_epochs:g} takes {in_all} samples, but the checkpoint of "
            f"step {manifest.step} was written after {taken}: raise it, or resume from an earlier checkpoint"
        )


def _matters(key: str) -> bool:
    return not (key in SECRETS or key in _NO_MATTER or key.startswith(_NO_MATTER_BEGINNINGS))


def _flat(sections: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, fields in sections.items()
        if isinstance(fields, dict)
        for name, value in fields.items()
    }
