"""Filling a stage of the Megatron backend for generation: from a Hugging Face directory, or a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_llm.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from mindspeed_llm.core.lora.settings import LoraSettings
    from mindspeed_llm.training.checkpointing.loading import Opened


def fill(model: nn.Module, args: Namespace, lora: LoraSettings | None) -> None:
    """Fill a stage with the weights of `args.load`; with `lora` put adapters on it, from there or from `args.lora_load`
    (a collective).

    Weights are cut anew for the ranks of this job, whatever ranks wrote them.

    Raises:
        UserError: they do not belong to the model.
        CheckpointError: a checkpoint is damaged, or asks for something to be executed.
    """
    from mindspeed_llm.tasks.models.hf_weights import load_hf_weights
    from mindspeed_llm.training.folders import hf_directory

    folder = hf_directory(args)
    if folder is not None:
        _check_adapters(args, lora, has_own=False)
        load_hf_weights([model], folder, args)
        _attach(model, lora)
    else:
        _attach(model, lora)
        _fill_from_checkpoint(model, args, lora)
    if lora is not None and args.lora_load is not None:
        _fill_adapters(model, args, lora)


def _attach(model: nn.Module, lora: LoraSettings | None) -> None:
    from mindspeed_llm.core.lora.attach import attach

    if lora is not None:
        attach([model], lora)


def _fill_from_checkpoint(model: nn.Module, args: Namespace, lora: LoraSettings | None) -> None:
    from mindspeed_llm.training.checkpointing.adapters import check_flags
    from mindspeed_llm.training.checkpointing.loading import load_opened_weights, open_chosen, parts_in
    from mindspeed_llm.training.checkpointing.model_part import Part

    # With --lora-load --ckpt-step is a step of the adapters.
    args = Namespace(**{**vars(args), "ckpt_step": None if args.lora_load is not None else args.ckpt_step})
    chosen, storage = _choose(args)
    if lora is None and (saved := _of_other_ranks(chosen.folder, chosen.ckpt_format, args)) is not None:
        storage.together(f"loading {chosen.folder}", lambda: _fill_from_other_ranks(model, chosen.folder, args, saved))
        return
    found = open_chosen(chosen, args, storage)
    parts = parts_in(found)
    if Part.BASE not in parts:
        raise UserError(
            f"--load {chosen.folder} holds adapters without a model; name the model's folder with --load, and this one "
            "with --lora-load"
        )
    _check_adapters(args, lora, has_own=Part.ADAPTERS in parts)
    if lora is None:
        load_opened_weights(found, args, [model])
    elif args.lora_load is None:
        check_flags(found, lora, args)
        load_opened_weights(found, args, [model])
    else:
        load_opened_weights(found, args, [model], Part.BASE)


def _choose(args: Namespace) -> tuple[Any, Any]:
    """The checkpoint of `args.load`, and how ranks see its folder (a collective)."""
    from mindspeed_llm.checkpoints.storage import open_storage_for_reading
    from mindspeed_llm.training.checkpointing.choose import choose

    assert dist.group.WORLD is not None
    storage = open_storage_for_reading(Path(args.load), dist.group.WORLD)
    chosen = choose(args, storage)
    if chosen is None:
        raise UserError(f"--load {args.load} holds no checkpoint; expected folders named iter_ and seven digits")
    return chosen, storage


def _check_adapters(args: Namespace, lora: LoraSettings | None, *, has_own: bool) -> None:
    if lora is not None and args.lora_load is None and not has_own:
        raise UserError(
            f"--lora-target-modules {' '.join(lora.targets)}: --load {args.load} holds no adapters; name their folder "
            "with --lora-load, or leave --lora-target-modules out"
        )
    if lora is None and has_own:
        raise UserError(
            f"--load {args.load} is the checkpoint of a LoRA run that does not say where its adapters are; give "
            "--lora-target-modules, --lora-r and --lora-alpha as they were"
        )


def _fill_adapters(model: nn.Module, args: Namespace, lora: LoraSettings) -> None:
    from mindspeed_llm.checkpoints.storage import open_storage_for_reading
    from mindspeed_llm.tasks.checkpoint.peft_files import is_peft
    from mindspeed_llm.tasks.models.hf_adapters import load_peft_adapter
    from mindspeed_llm.training.checkpointing.adapters import check_flags
    from mindspeed_llm.training.checkpointing.loading import load_opened_weights, open_chosen, parts_in
    from mindspeed_llm.training.checkpointing.model_part import Part
    from mindspeed_llm.training.folders import hf_directory, in_words_of

    folder = Path(args.lora_load)
    if is_peft(folder):
        source = hf_directory(args) or (Path(args.model_from_hf) if args.model_from_hf else None)
        if source is None:
            raise UserError(
                f"--lora-load {folder}: PEFT's files name layers as the Hugging Face model does; give its folder to "
                "--model-from-hf"
            )
        assert dist.group.WORLD is not None
        storage = open_storage_for_reading(folder, dist.group.WORLD)
        storage.together(f"loading {folder}", lambda: load_peft_adapter([model], folder, source, args, lora))
        return
    of_adapters = Namespace(**{**vars(args), "load": args.lora_load})
    with in_words_of({"--load": "--lora-load"}):
        chosen, storage = _choose(of_adapters)
        found: Opened = open_chosen(chosen, of_adapters, storage)
        if Part.ADAPTERS not in parts_in(found):
            raise UserError(f"--load {chosen.folder} holds no adapters; expected the checkpoint of a LoRA run")
        check_flags(found, lora, args)
        load_opened_weights(found, of_adapters, [model], Part.ADAPTERS)


def _of_other_ranks(folder: Path, ckpt_format: str, args: Namespace) -> dict[str, Any] | None:
    """The arguments in rank files that are cut for other ranks than those of this job; None where they fit, or where
    the format knows no ranks.
    """
    from mindspeed_llm.training.checkpointing.layout import TORCH
    from mindspeed_llm.training.checkpointing.saved_args import check_structure, check_topology

    if ckpt_format != TORCH:
        return None
    from mindspeed_llm.tasks.checkpoint.mg_reader import MgDirectory

    saved = dict(MgDirectory(folder).arguments)
    try:
        check_topology(saved, args, folder)
    except UserError:
        check_structure(saved, args, folder)
        return saved
    return None


def _fill_from_other_ranks(model: nn.Module, folder: Path, args: Namespace, saved: dict[str, Any]) -> None:
    """Read the parts of this rank wherever they stand, by the tables of the converter."""
    from mindspeed_llm.tasks.checkpoint.load import load
    from mindspeed_llm.tasks.checkpoint.model import bind
    from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
    from mindspeed_llm.tasks.checkpoint.sources import WithCopies
    from mindspeed_llm.tasks.models.hf_weights import fill, parameters, topology_of

    family = args.model_type_hf or saved.get("model_type_hf") or _family(args)
    request = ConversionRequest(
        load_model_type="mg", save_model_type="mg", load_dir=folder, save_dir=folder, model_type_hf=family
    )
    loaded = load(request)
    bound = bind(loaded.family, loaded.settings, topology_of(args))
    source = WithCopies(loaded.source, bound.written_copies)
    left = fill([parameters(model)], bound, source, misplaced=lambda found: f"--load {folder}: {found}")
    if left:
        raise UserError(f"--load {folder} has nothing for {left[0]} and {len(left) - 1} more parameters of the model")


def _family(args: Namespace) -> str:
    """A family whose weights have the layers of this model: on the way from checkpoint to checkpoint their names in
    between are no matter.
    """
    if args.num_experts:
        if args.qk_layernorm:
            return "qwen3-moe"
        return "qwen2-moe" if args.moe_shared_expert_intermediate_size else "mixtral"
    if args.qk_layernorm:
        return "qwen3"
    return "qwen25" if args.add_qkv_bias and not args.add_bias_linear else "llama2"
