"""The field or file that a misspelt name most likely means."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from mindspeed_llm.fsdp2.config.config import SECTIONS
from mindspeed_llm.fsdp2.config.fields import all_fields

# Names of the same setting in the Megatron backend and in other trainers, which no spelling distance finds.
_KNOWN_ELSEWHERE = {
    "load": "model.model_name_or_path",
    "model_path": "model.model_name_or_path",
    "data_path": "data.dataset",
    "seq_length": "data.cutoff_len",
    "max_length": "data.cutoff_len",
    "pack": "data.packing",
    "workers": "data.preprocessing_num_workers",
    "num_workers": "training.dataloader_num_workers",
    "tensor_model_parallel_size": "parallel.tp_size",
    "expert_model_parallel_size": "parallel.ep_size",
    "context_parallel_size": "parallel.cp_size",
    "context_parallel_algo": "parallel.cp_type",
    "recompute_granularity": "parallel.recompute",
    "recompute_method": "parallel.recompute",
    "gradient_checkpointing": "parallel.recompute",
    "micro_batch_size": "training.per_device_train_batch_size",
    "global_batch_size": "training.gradient_accumulation_steps",
    "train_iters": "training.max_steps",
    "save": "training.output_dir",
    "save_interval": "training.save_steps",
    "log_interval": "training.logging_steps",
    "eval_interval": "training.eval_steps",
    "learning_rate": "training.lr",
    "min_learning_rate": "training.min_lr",
    "lr_decay_style": "training.lr_scheduler_type",
    "lr_warmup_fraction": "training.warmup_ratio",
    "lora_r": "model.lora_rank",
    "lora_target_modules": "model.lora_target",
    "lora_load": "model.adapter_name_or_path",
    "pref_beta": "training.dpo_beta",
    "pref_loss": "training.dpo_loss_type",
    "beta": "training.dpo_beta",
    "loss_type": "training.dpo_loss_type",
    "no_shuffle": "training.disable_shuffling",
    "clip_grad": "training.max_grad_norm",
    "epochs": "training.num_train_epochs",
    "num_epochs": "training.num_train_epochs",
}


_KINDS = (
    "what is trained follows from other fields: adapters with model.lora_rank or model.adapter_name_or_path, else all "
    "weights but those of model.freeze_modules"
)
_PLAIN_ONLY = "adapters are plain LoRA on linear layers (model.lora_rank, model.lora_alpha, model.lora_target)"
_NOT_HERE = {
    "finetuning_type": _KINDS,
    "peft": _KINDS,
    "pissa_init": _PLAIN_ONLY,
    "use_dora": _PLAIN_ONLY,
    "use_rslora": _PLAIN_ONLY,
    "additional_target": _PLAIN_ONLY,
}


def not_here(section: str, name: str = "") -> str | None:
    """Why a field known from other trainers does not exist, where its feature as a whole is missing."""
    bare = name.replace("-", "_").lower()
    if section.lower() in ("lora", "peft") or "qlora" in (section.lower(), bare):
        return _PLAIN_ONLY
    return _NOT_HERE.get(bare)


def nearest_field(section: str, name: str) -> str:
    """The key `section.name` of the field that `section.name`, which does not exist, most likely means.

    A field of exactly this name in another section comes first, then a name known from elsewhere (nearly so spelt),
    then spelling, first among the fields of the same section.
    """
    fields = all_fields()
    bare = name.replace("-", "_").rstrip(":").lower()
    for other in SECTIONS:
        if f"{other}.{bare}" in fields:
            return f"{other}.{bare}"
    known = known_elsewhere(bare)
    own = [spec.name for spec in fields.values() if spec.section == section]
    if known and not difflib.get_close_matches(bare, own, n=1, cutoff=0.85):
        return known
    close = difflib.get_close_matches(bare, own, n=1, cutoff=0.6)
    if close:
        return f"{section}.{close[0]}"
    close = difflib.get_close_matches(bare, [spec.name for spec in fields.values()], n=1, cutoff=0.6)
    if close:
        return next(key for key, spec in fields.items() if spec.name == close[0])
    return nearest(f"{section}.{bare}", fields)


def known_elsewhere(name: str) -> str | None:
    """The field that `name`, or a name spelt nearly so, stands for in the Megatron backend or in other trainers."""
    near = difflib.get_close_matches(name.replace("-", "_").lower(), _KNOWN_ELSEWHERE, n=1, cutoff=0.85)
    return _KNOWN_ELSEWHERE[near[0]] if near else None


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that is spelt most like `name`."""
    return max(names, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio())


def near_files(path: Path) -> list[str]:
    """Up to three YAML files of the folder of `path` with a similar name; any three if none is similar."""
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml"))
    return difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or names[:3]
