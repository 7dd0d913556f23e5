"""All checks of a configuration that need no tensor, and the notices about settings without effect."""

from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import why_unwritable
from mindspeed_llm.fsdp2.checkpoint.manifest import exports_folder, steps_in
from mindspeed_llm.fsdp2.config.adapter_files import MERGED, read_adapter_config, replaced_by_export
from mindspeed_llm.fsdp2.config.config import SECRETS, Config
from mindspeed_llm.fsdp2.config.data_checks import check_data, data_notices
from mindspeed_llm.fsdp2.config.fields import FieldSpec, all_fields
from mindspeed_llm.fsdp2.config.help import shown
from mindspeed_llm.fsdp2.config.inert import IDLE, INERT
from mindspeed_llm.fsdp2.config.model_files import check_model_files
from mindspeed_llm.fsdp2.config.not_available import NOT_AVAILABLE
from mindspeed_llm.fsdp2.config.patterns import compile_pattern
from mindspeed_llm.fsdp2.config.reference_model import naming_reference, reference_config
from mindspeed_llm.fsdp2.config.types import comma_list
from mindspeed_llm.fsdp2.config.values import from_yaml

_DSA_MODELS = ("glm52", "deepseek_v4")
# Switches that only some model families have.
_MODEL_SWITCHES: dict[str, tuple[str, ...]] = {
    "optimization.use_sparse_flash_attn": _DSA_MODELS,
    "optimization.use_fused_lightning_indexer": _DSA_MODELS,
    "optimization.use_fused_lightning_indexer_loss": _DSA_MODELS,
    "optimization.use_ascend_mhc": ("deepseek_v4",),
    "optimization.use_triton_swiglu_limit": ("deepseek_v4",),
    "optimization.use_triton_gdn": ("qwen3_next",),
    "optimization.use_flash_gdn": ("qwen3_next",),
    "optimization.use_triton_rmsnormgated": ("mamba3",),
}
_PATTERN_FIELDS = (
    "model.freeze_modules",
    "model.quant_apply_modules",
    "model.quant_ignored_modules",
    "parallel.fsdp_modules",
    "parallel.ignored_modules",
    "parallel.hook_modules",
    "parallel.tp_colwise",
    "parallel.tp_rowwise",
    "parallel.ep_modules",
    "parallel.ep_fsdp_modules",
    "parallel.recompute_modules",
    "parallel.chunk_mbs_modules",
)


_STARTS_FROM = ("model.model_name_or_path", "training.ref_model", "model.adapter_name_or_path")


def check_config(config: Config, *, world_size: int) -> list[str]:
    """Check `config` for a run of `world_size` ranks; return notices to be logged once.

    Raises `UserError` at the first fault: values out of range, fields that disagree, features that are not available,
    a world that `parallel.fsdp_size` does not divide, a model directory that lacks files, an output folder that cannot
    be written. Data files and the tokenizer are checked by those who read them.
    """
    _check_values(config)
    _check_model_switches(config)
    _check_available(config)
    _check_patterns(config)
    config.parallel.resolved_fsdp_size(world_size)
    _check_training(config)
    check_data(config)
    _check_trainable(config)
    if config.training.profile:
        _check_profile(config, world_size)
    description = check_model_files(config.model)
    if config.training.ref_model is not None and config.training.stage == "dpo":
        with naming_reference(config):
            check_model_files(reference_config(config).model)
    _check_output_dir(config)
    return [*_notices(config), *data_notices(config), *_length_notice(config, description)]


def value_of(config: Config, key: str) -> Any:
    """The value of the field `section.name`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _check_values(config: Config) -> None:
    """Types, choices and ranges once more: a configuration may have been built without the loader."""
    for key, spec in all_fields().items():
        try:
            from_yaml(spec, value_of(config, key))
        except ValueError as error:
            raise UserError(f"{key}: {error}. Expected {spec.expected}.") from None


def _check_model_switches(config: Config) -> None:
    model_id = config.model.model_id
    for key, families in _MODEL_SWITCHES.items():
        if value_of(config, key) and model_id not in families:
            raise UserError(
                f"{key} = true and model.model_id = {shown(model_id)} disagree: the switch belongs to model_id "
                f"{' or '.join(families)}"
            )
    if config.optimization.use_triton_gdn and config.optimization.use_flash_gdn:
        raise UserError(
            "optimization.use_triton_gdn = true and optimization.use_flash_gdn = true exclude each other: choose one"
        )
    if model_id == "qwen3_next" and config.parallel.cp_size > 1 and config.parallel.cp_type != "ulysses":
        raise UserError(
            f"model.model_id = qwen3_next and parallel.cp_type = {config.parallel.cp_type} disagree: with "
            f"parallel.cp_size = {config.parallel.cp_size} this model needs cp_type ulysses"
        )


def _check_available(config: Config) -> None:
    for key, row in NOT_AVAILABLE.items():
        value = value_of(config, key)
        default = all_fields()[key].default
        if row.refuses(value, default):
            raise UserError(
                f"{key} = {shown(value)} is not available yet: {row.reason}. The default {shown(default)} is."
            )


def _check_patterns(config: Config) -> None:
    for key in _PATTERN_FIELDS:
        for pattern in value_of(config, key) or ():
            try:
                compile_pattern(pattern)
            except UserError as error:
                raise UserError(f"{key}: {error}") from None
    if not config.parallel.fsdp_modules:
        raise UserError("parallel.fsdp_modules is empty. Expected at least one pattern, such as model.layers.{*}")
    if config.parallel.recompute and not config.parallel.recompute_modules:
        raise UserError(
            "parallel.recompute = true and an empty parallel.recompute_modules disagree: name what to recompute"
        )


def _check_training(config: Config) -> None:
    training = config.training
    if training.max_steps == 0:
        raise UserError(
            "training.max_steps = 0 trains nothing. Expected a number of steps, or -1 for num_train_epochs."
        )
    if training.lr_scheduler_type == "cosine" and training.min_lr > training.lr:
        raise UserError(
            f"training.min_lr = {training.min_lr:g} is above training.lr = {training.lr:g}: the cosine falls from "
            "lr to min_lr. Lower min_lr."
        )
    # A folder of tokenized data may bring its own.
    if training.eval_samples and not config.data.has_eval_data and config.data.tokenized_path is None:
        raise UserError(
            f"training.eval_samples = {training.eval_samples} asks prompts of the evaluation data, but there is none: "
            "set data.eval_dataset or data.val_size (manager mg: data.split), or leave it out"
        )
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        value = getattr(training, name)
        if value and training.dataloader_num_workers == 0:
            raise UserError(
                f"training.{name} = {shown(value)} and training.dataloader_num_workers = 0 disagree: it is about "
                "loading processes, and there are none. Raise dataloader_num_workers or leave it out."
            )


def _check_trainable(config: Config) -> None:
    model = config.model
    if not model.has_adapters:
        if config.training.merge_adapter:
            raise UserError(
                "training.merge_adapter = true needs an adapter: set model.lora_rank or model.adapter_name_or_path"
            )
        return
    source = "lora_rank" if model.lora_rank is not None else "adapter_name_or_path"
    if model.freeze_modules:
        raise UserError(
            f"model.freeze_modules = {shown(model.freeze_modules)} and model.{source} = "
            f"{shown(getattr(model, source))} disagree: all but the adapters is frozen. Say with lora_target which "
            "layers get adapters."
        )
    if model.train_from_scratch:
        raise UserError(
            f"model.train_from_scratch = true and model.{source} = {shown(getattr(model, source))} disagree: adapters "
            "change a model that has been trained. Set one of them back."
        )
    if not all(comma_list(model.lora_target)):
        raise UserError(
            f"model.lora_target = {model.lora_target!r} is empty or has an empty name between its commas. "
            "Expected names of linear layers, such as q_proj,v_proj, or all"
        )
    if model.adapter_name_or_path is None:
        return
    given = read_adapter_config(model.adapter_name_or_path)
    for field, name in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        value = getattr(model, field)
        if value is not None and value != given[name]:
            raise UserError(
                f"model.{field} = {shown(value)} and model.adapter_name_or_path disagree: "
                f"{model.adapter_name_or_path} has {name} {given[name]}. Leave {field} out."
            )


def _check_profile(config: Config, world_size: int) -> None:
    training = config.training
    start, end = training.profile_step_start, training.profile_step_end
    if end == 0 or 0 < end <= start:
        raise UserError(
            f"training.profile_step_end = {end} is not above training.profile_step_start = {start}: no step would be "
            "recorded. The end itself is not recorded; -1 stands for the end of training."
        )
    if 0 < training.max_steps <= start:
        raise UserError(
            f"training.profile_step_start = {start} is not below training.max_steps = {training.max_steps}: no step "
            "would be recorded"
        )
    ranks = training.profile_ranks
    if ranks != [-1] and (not ranks or not all(0 <= rank < world_size for rank in ranks)):
        raise UserError(
            f"training.profile_ranks = {shown(ranks)} does not fit {world_size} ranks: expected ranks from 0 to "
            f"{world_size - 1}, or -1 alone for all"
        )


def _check_output_dir(config: Config) -> None:
    text = config.training.output_dir
    if not text:
        raise UserError("training.output_dir is empty. Expected a folder to write to.")
    path = Path(text)
    if reason := why_unwritable(path):
        raise UserError(f"training.output_dir = {text!r} cannot be written: {reason}; name another folder")
    for key in _STARTS_FROM:
        source = value_of(config, key)
        if source is not None and Path(source).exists():
            _check_kept(config, key, Path(source))


def _check_kept(config: Config, key: str, source: Path) -> None:
    """What a run starts from must still be there when it has ended, and when it resumes."""
    text = config.training.output_dir
    path = Path(text)
    if path.exists() and path.samefile(source):
        raise UserError(
            f"training.output_dir and {key} are the same folder {text!r}: the trained model would overwrite what it "
            "starts from. Name another output_dir."
        )
    taken = [folder for folder in replaced_by_export(path) if folder != path]
    if config.training.merge_adapter:
        taken.append(path / MERGED)
    if steps_in(exports_folder(path)):
        taken.append(exports_folder(path))  # an earlier run's, which is set aside as a whole
    for folder in taken:
        if source.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{key} = {str(source)!r} is an export in training.output_dir = {text!r}: the run would replace it or "
                "move it away. Name another output_dir."
            )


def _notices(config: Config) -> list[str]:
    """One line per reason for the fields that are set and will do nothing."""
    by_reason: dict[str, list[str]] = {}
    for key, spec in all_fields().items():
        value = value_of(config, key)
        reason = _no_effect(config, spec) if value != spec.default else None
        if reason:
            by_reason.setdefault(reason, []).append(key if key in SECRETS else f"{key} = {shown(value)}")
    return [f"no effect from {', '.join(fields)}: {reason}" for reason, fields in by_reason.items()]


def _no_effect(config: Config, spec: FieldSpec) -> str | None:
    if spec.key in INERT:
        return INERT[spec.key]
    if spec.key in IDLE:
        row = IDLE[spec.key]
        other = value_of(config, row.because)
        return f"{row.because} is {shown(other)}" if row.idle(other) else None
    if spec.key in ("model.lora_alpha", "model.lora_dropout", "model.lora_target"):
        if not config.model.has_adapters:
            return "neither model.lora_rank nor model.adapter_name_or_path is set"
        is_given = config.model.adapter_name_or_path is not None and spec.key == "model.lora_target"
        return "model.adapter_name_or_path is set, and the adapter has its own" if is_given else None
    if spec.key in ("training.per_device_eval_batch_size", "data.eval_max_samples", "data.eval_on_each_dataset"):
        return None if config.data.has_eval_data else "there is no evaluation data"
    return None


def _length_notice(config: Config, description: dict[str, Any] | None) -> list[str]:
    longest = (description or {}).get("max_position_embeddings")
    if isinstance(longest, int) and config.data.cutoff_len > longest:
        return [
            f"data.cutoff_len = {config.data.cutoff_len} is above max_position_embeddings = {longest} of the model: it "
            "has not seen such positions"
        ]
    return []
