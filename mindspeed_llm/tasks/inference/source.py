"""Where a model comes from and which backend computes it: found out, and checked against the flags, before any heavy
work. Needs no torch.
"""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_llm.errors import UserError
from mindspeed_llm.flag import Flag
from mindspeed_llm.tasks.inference.kinds import KINDS, Kind, Source, detect

_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
)
# Flag -> the field of config.json that says the same.
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}
_ITERATION = re.compile(r"iter_(\d{7,})")
BackendName = Literal["hf", "megatron"]


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What --load names, and what computes it."""

    path: Path
    """The folder of the model; of one checkpoint, where --load names a run of the FSDP2 backend."""
    kind: Kind
    backend: BackendName
    description: str
    """What was found, for people."""


def find_source(args: Namespace, world_size: int) -> ModelSource:
    """What `args.load` is; lines about flags that have no part in loading it come to `args.notices`.

    Raises:
        UserError: --load is missing or names nothing that can be loaded; flags that do not go with what it names, or
            with the backend.
    """
    if args.load is None:
        raise UserError(
            "--load is missing; expected a Hugging Face model directory, a PEFT adapter, a checkpoint of the FSDP2 "
            "backend, or a folder of Megatron checkpoints"
        )
    # With --lora-load a step is that of the adapters.
    path = _at_step(Path(args.load), args.ckpt_step if args.lora_load is None else None)
    found = detect(path)
    kind = found.kind
    backend = _backend(args, kind)
    if args.base_model is not None and kind not in ("peft", "fsdp2"):
        raise UserError(
            f"--base-model {args.base_model} is for a PEFT adapter or a checkpoint of the FSDP2 backend, but --load "
            f"{path} is {KINDS[kind]}"
        )
    if args.ckpt_step is not None:
        _check_step(args, found)
    if backend == "hf":
        _check_hf(args, found.folder, world_size)
    else:
        _check_megatron(args)
        if kind == "mcore":
            return _checkpoints(args, found)
    return ModelSource(path=found.folder, kind=kind, backend=backend, description=found.description)


def world_size_of(args: Namespace) -> int:
    """The number of ranks of the job, or of the one that is planned, with --check.

    Raises:
        UserError: WORLD_SIZE is no number above 0.
    """
    if args.check:
        return args.check
    text = os.environ.get("WORLD_SIZE")
    if text is None and args.check is not None:
        from mindspeed_llm.training.arguments.checks.parallel import smallest_world_size

        return smallest_world_size(args)
    if text is not None and (not text.isdecimal() or not int(text)):
        raise UserError(f"WORLD_SIZE {text!r} in the environment: expected a number above 0, as torchrun sets it")
    return int(text or 1)


def _checkpoints(args: Namespace, found: Source) -> ModelSource:
    """The folder of several checkpoints, where --load names one of them."""
    from mindspeed_llm.training.checkpointing.layout import TRACKER, check_release, read_tracker

    folder, step = found.folder, _ITERATION.fullmatch(found.folder.name)
    if check_release(folder, "--load"):
        folder = folder.parent
    elif step is None and any(folder.glob("mp_rank_*")):
        raise UserError(
            f"--load {folder} holds rank files; expected the folder that has iter_... or release folders, and "
            "latest_checkpointed_iteration.txt"
        )
    if step is not None and args.lora_load is not None:
        # A step is that of the adapters.
        latest = read_tracker(folder.parent).iteration
        if latest != int(step[1]):
            raise UserError(
                f"--load {folder}: with --lora-load the model is the checkpoint that {TRACKER} beside it names "
                f"({latest}); name the folder of the checkpoints with --load, or write {int(step[1])} into that file"
            )
        folder = folder.parent
    elif step is not None:
        if args.ckpt_step not in (None, int(step[1])):
            raise UserError(f"--ckpt-step {args.ckpt_step} contradicts --load {folder}; leave one of them out")
        folder, args.ckpt_step = folder.parent, int(step[1])
    args.load = str(folder)
    return ModelSource(path=folder, kind=found.kind, backend="megatron", description=found.description)


def _at_step(path: Path, step: int | None) -> Path:
    """The checkpoint of a step in the output folder of an FSDP2 run; any other folder as it is."""
    if step is None:
        return path
    candidates = (path / f"global_step_{step}", path / "checkpoints" / f"global_step_{step}")
    return next((folder for folder in candidates if folder.is_dir()), path)


def _check_step(args: Namespace, found: Source) -> None:
    """Refuse a step that is not the one of what was found; steps of Megatron checkpoints are looked for by their
    loader.

    Raises:
        UserError: it is another one, or there are no steps.
    """
    from mindspeed_llm.fsdp2.checkpoint import manifest

    step, path = args.ckpt_step, Path(args.load)
    if found.kind == "mcore" or args.lora_load is not None:
        return
    if found.kind == "fsdp2":
        there = manifest.read_manifest(found.folder).step
        if there == step:
            return
        if found.folder == path:
            raise UserError(
                f"--ckpt-step {step} contradicts --load {path}, the checkpoint of step {there}; its folder has: "
                f"{_steps(path.parent) or there}. Leave one of the flags out, or name that folder with --load"
            )
    if steps := _steps(path) or _steps(manifest.checkpoints_folder(path)):
        raise UserError(f"--ckpt-step {step}: --load {path} has no checkpoint of this step; there are: {steps}")
    raise UserError(f"--ckpt-step {step}: --load {path} is {KINDS[found.kind]}, which has no steps")


def _steps(folder: Path) -> str:
    """The steps of the checkpoints of the FSDP2 backend in a folder; empty where there are none."""
    from mindspeed_llm.fsdp2.checkpoint import manifest

    return ", ".join(str(step) for step, _ in manifest.steps_in(folder))


def _backend(args: Namespace, kind: Kind) -> BackendName:
    asked: Literal["auto", "hf", "megatron"] = args.backend
    for name in ("use_mcore_models", "enable_hf2mg_convert"):
        if getattr(args, name):
            if asked == "hf":
                raise UserError(f"{_flag(name)} contradicts --backend hf; leave one of them out")
            asked = "megatron"
    if asked == "auto":
        return "megatron" if kind == "mcore" else "hf"
    if asked == "hf" and kind == "mcore":
        raise UserError(
            f"--backend hf: --load {args.load} is {KINDS[kind]}; leave --backend out, or convert it with "
            "convert_ckpt_v2.py --save-model-type hf"
        )
    if asked == "megatron" and kind in ("peft", "fsdp2"):
        flag = "--use-mcore-models" if args.use_mcore_models else "--backend megatron"
        raise UserError(f"{flag}: --load {args.load} is {KINDS[kind]}, which --backend hf computes; leave {flag} out")
    return asked


def _check_hf(args: Namespace, path: Path, world_size: int) -> None:
    for name in _PARALLEL:
        if name in args.given and getattr(args, name) != 1:
            raise UserError(
                f"{_flag(name)} {getattr(args, name)}: the ranks of --backend hf each have a whole model, or share one "
                "with --shard-weights; add --backend megatron, or leave it out"
            )
    for name in ("lora_load", "lora_target_modules"):
        if name in args.given:
            raise UserError(
                f"{_flag(name)} is for --backend megatron; with --backend hf name the adapter with --load, and its "
                "model with --base-model"
            )
    if args.shard_weights and world_size == 1:
        args.notices += ("--shard-weights has no effect: there is one rank",)
        args.shard_weights = False
    _compare_sizes(args, path / "config.json")
    idle = [flag.name for flag in _described() if flag.dest in args.given and flag.dest not in ("seed",)]
    if idle:
        args.notices += (f"no effect, as config.json describes the model of --load: {' '.join(idle)}",)


def _compare_sizes(args: Namespace, file: Path) -> None:
    """Refuse flags that describe another model than the configuration beside the weights."""
    given = [name for name in _SIZES if name in args.given]
    if not given or not file.is_file():
        return
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        said = {name: config.get(_SIZES[name]) for name in given}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}); expected a JSON object") from error
    for name, value in said.items():
        mine = getattr(args, name)
        if value is not None and value != mine:
            raise UserError(
                f"{_flag(name)} {mine} contradicts {file}, which says {_SIZES[name]} {value}; leave the flag out, or "
                "load another model"
            )


def _described() -> list[Flag]:
    """The flags that describe a model of the Megatron backend and its spread over ranks."""
    from mindspeed_llm.training.arguments import tables

    return [flag for group in tables.OF_MODEL for flag in group.flags]


def _check_megatron(args: Namespace) -> None:
    for name in ("shard_weights", "trust_remote_code"):
        if getattr(args, name):
            way = "; spread weights with --tensor-model-parallel-size and --pipeline-model-parallel-size"
            raise UserError(f"{_flag(name)} is for --backend hf{way if name == 'shard_weights' else ''}; leave it out")


def _flag(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"
