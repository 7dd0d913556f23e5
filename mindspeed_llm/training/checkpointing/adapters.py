"""Loading a run that trains adapters: the model from `--load`, the adapters from there or from `--lora-load`.

    --load               --lora-load                the run
    a model              -                          begins with new adapters
    a run's checkpoint   -                          goes on, where that holds adapters beside the model
    a model              PEFT's files               begins with those adapters
    a model              a run's checkpoint         goes on; --finetune, --no-load-optim and --no-load-rng mean of it
                                                    what they mean of --load elsewhere

A model is a Hugging Face directory, or a checkpoint of which nothing but weights is taken. `--ckpt-step` is a step of
the run that goes on: with a run's checkpoint in `--lora-load` one of those there, and of `--load` the latest is taken.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_llm.checkpoints.storage import open_storage_for_reading
from mindspeed_llm.core.lora.local_learning import local_rules
from mindspeed_llm.core.lora.settings import LoraSettings, lora_settings
from mindspeed_llm.core.shared_master import masters_in_fp32
from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.tasks.checkpoint.peft_files import is_peft
from mindspeed_llm.tasks.models.hf_adapters import load_peft_adapter
from mindspeed_llm.training.checkpointing import content as contents
from mindspeed_llm.training.checkpointing.loading import Opened, load_opened, open_checkpoint, parts_in
from mindspeed_llm.training.checkpointing.model_part import Part
from mindspeed_llm.training.folders import hf_directory, in_words_of
from mindspeed_llm.training.setup import TrainingModel
from mindspeed_llm.training.state import TrainState

logger = get_logger(__name__)


def load_with_adapters(args: Namespace, model: TrainingModel) -> TrainState | None:
    """Load the model, unless it came from a Hugging Face directory, and its adapters (a collective). None where the run
    starts at step 0 with new adapters.

    Raises:
        UserError: on all ranks; something belongs to another model or topology, other flags of LoRA were given, or
            there is nothing to load.
        CheckpointError: on all ranks; a checkpoint is damaged, or asks for something to be executed.
    """
    settings = lora_settings(args)
    assert settings is not None
    has_weights = hf_directory(args) is not None
    from_peft = args.lora_load is not None and _is_peft(Path(args.lora_load))
    state = None
    if args.load is not None and not has_weights:
        found = open_checkpoint(_for_model(args, from_peft=from_peft))
        if found is not None:
            has_weights = True
            state = _load_model(found, args, model, settings)
    if args.lora_load is None:
        return state
    if not has_weights:
        raise UserError(f"--lora-load {args.lora_load} holds adapters for a model; name the model's folder with --load")
    if from_peft:
        _load_peft(args, model, settings)
        return None
    return _load_adapters(args, model, settings)


def _is_peft(folder: Path) -> bool:
    assert dist.group.WORLD is not None
    return open_storage_for_reading(folder, dist.group.WORLD).gather(is_peft(folder))[0]


def _for_model(args: Namespace, *, from_peft: bool) -> Namespace:
    """The arguments with which the checkpoint of `--load` is looked for."""
    if args.lora_load is None or from_peft:
        return args
    # --ckpt-step is a step of the adapters.
    return Namespace(**{**vars(args), "ckpt_step": None})


def _load_model(found: Opened, args: Namespace, model: TrainingModel, settings: LoraSettings) -> TrainState | None:
    folder = found.chosen.folder
    parts = parts_in(found)
    if Part.BASE not in parts:
        raise UserError(
            f"--load {folder} holds adapters without a model; name the model's folder with --load, and this one with "
            "--lora-load"
        )
    if args.lora_load is None and Part.ADAPTERS in parts:
        check_flags(found, settings, args)
        return load_opened(found, args, model)
    weights_only = Namespace(**{**vars(args), "finetune": True})
    load_opened(found, weights_only, model, Part.BASE)
    return None


def _load_peft(args: Namespace, model: TrainingModel, settings: LoraSettings) -> None:
    folder = Path(args.lora_load)
    source = hf_directory(args) or (Path(args.model_from_hf) if args.model_from_hf else None)
    if source is None:
        raise UserError(
            f"--lora-load {folder}: PEFT's files name layers as the Hugging Face model does, and --load {args.load} is "
            "no Hugging Face directory; give its folder to --model-from-hf or --load, or convert the adapter with "
            "convert_ckpt_v2.py --lora-target-modules"
        )
    assert dist.group.WORLD is not None

    def load() -> None:
        load_peft_adapter(model.modules, folder, source, args, settings)
        if any(not half.b.any() for rule in local_rules(model.modules) for half in rule.halves):
            raise UserError(
                f"--lora-load {folder}: its B are zeros, as before any training, which local updates never move. Leave "
                "it out, since adapters of local layers begin with small numbers; or leave out "
                "--lu-lora-final-layer-index"
            )

    open_storage_for_reading(folder, dist.group.WORLD).together(f"loading {folder}", load)
    with masters_in_fp32(model.optimizer, changed=True):
        model.optimizer.reload_model_params()
    logger.info("Took the adapter of %s; training starts at step 0", folder)


def _load_adapters(args: Namespace, model: TrainingModel, settings: LoraSettings) -> TrainState | None:
    of_adapters = Namespace(**{**vars(args), "load": args.lora_load})
    with in_words_of({"--load": "--lora-load"}):
        found = open_checkpoint(of_adapters)
        if found is None:
            return None
        if Part.ADAPTERS not in parts_in(found):
            raise UserError(f"--load {found.chosen.folder} holds no adapters; expected the checkpoint of a LoRA run")
        check_flags(found, settings, args)
        return load_opened(found, of_adapters, model, Part.ADAPTERS)


def check_flags(found: Opened, settings: LoraSettings, args: Namespace) -> None:
    """Compare the flags of LoRA with those that the adapters of a checkpoint were written with, where it says them.

    Raises:
        UserError: names both values.
    """
    saved: Mapping[str, Any] = contents.arguments_of(found.content)
    if saved.get("lora_r") is None:
        return
    targets = saved.get("lora_target_modules") or ()
    for name, own, before in (
        ("--lora-r", settings.rank, saved["lora_r"]),
        ("--lora-alpha", settings.alpha, saved.get("lora_alpha", settings.alpha)),
        ("--lora-target-modules", " ".join(sorted(settings.targets)), " ".join(sorted(targets))),
    ):
        if own != before:
            raise UserError(
                f"--load {found.chosen.folder}: its adapters were trained with {name} {before}, this run has {own}; "
                f"give {name} {before}"
            )
    if not (args.finetune or args.no_load_optim):
        _check_updates(found, saved, args)


def _check_updates(found: Opened, saved: Mapping[str, Any], args: Namespace) -> None:
    """Compare what says which adapters the optimizer has, and how they are grouped there."""
    own, before = _updates(vars(args)), _updates(saved)
    if own != before:
        raise UserError(
            f"--load {found.chosen.folder}: its adapters were trained {before}, those of this run are {own}; give the "
            "flags of then, or leave the optimizer's state with --no-load-optim"
        )


def _updates(args: Mapping[str, Any]) -> str:
    final = args.get("lu_lora_final_layer_index")
    if final is None:
        return "without --lu-lora-final-layer-index"
    return f"with --lu-lora-final-layer-index {final} --lu-lora-lr-ratio {args.get('lu_lora_lr_ratio', 1.0):g}"
