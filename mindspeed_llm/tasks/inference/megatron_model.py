"""The arguments of a model of the Megatron backend, completed from what lies beside its weights."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.source import ModelSource
from mindspeed_llm.tasks.inference.tokenizer import TOKENIZER_FLAGS, names_tokenizer

# Of arguments that other programs saved some are objects.
_PLAIN = (bool, int, float, str, tuple, list)
_LOG = logging.getLogger("mindspeed_llm")


def complete(args: Namespace, source: ModelSource) -> None:
    """Put the structure of the model into `args` where no flag gives it: from the config.json of a Hugging Face
    directory, or from the arguments that a checkpoint carries; and the tokenizer that these name.

    Raises:
        UserError: flags on the command line contradict config.json; a checkpoint cannot be read.
    """
    if source.kind == "hf" and args.num_layers is None and args.model_from_hf is None:
        args.model_from_hf = str(source.path)
    if args.model_from_hf is not None:
        from mindspeed_llm.training.arguments.model_from_hf import apply_model_from_hf

        _LOG.info("%s", apply_model_from_hf(args))
    elif source.kind == "mcore":
        _from_checkpoint(args, source.path)


def _from_checkpoint(args: Namespace, folder: Path) -> None:
    """Where --num-layers is given the flags describe the model: Megatron's habit, and the loader compares."""
    from mindspeed_llm.tasks.inference.adapters.megatron_arguments import model_arguments

    describes = args.num_layers is None
    if not describes and names_tokenizer(args):
        return
    found = _saved_arguments(folder, args.ckpt_step)
    if describes:
        if found.get("num_layers") is None:
            return
        for name in (*model_arguments(), "noop_layers"):
            if name not in args.given and name != "spec" and isinstance(found.get(name), _PLAIN):
                value = found[name]
                setattr(args, name, tuple(value) if isinstance(value, list) else value)
        if isinstance(args.noop_layers, str):
            args.noop_layers = tuple(map(int, filter(None, args.noop_layers.split(",")))) or None
        # Converters write the number of groups without the switch.
        args.group_query_attention = bool(found.get("group_query_attention", "num_query_groups" in found))
        _LOG.info("the structure of the model is taken from the arguments that %s carries", folder)
    if not names_tokenizer(args):
        named = {name: found.get(name) for name in TOKENIZER_FLAGS}
        paths = [Path(value) for name in TOKENIZER_FLAGS[1:] if isinstance(value := named[name], str)]
        if paths and all(path.exists() for path in paths):
            vars(args).update(named)
            _LOG.info("the tokenizer is that of the run: %s", " ".join(map(str, paths)))


def _saved_arguments(folder: Path, step: int | None) -> Mapping[str, Any]:
    """The arguments that a checkpoint carries; empty where there are none. Raises UserError where a file is damaged."""
    from mindspeed_llm.tasks.checkpoint.torch_file import read_torch_file
    from mindspeed_llm.training.checkpointing import layout

    tracker = layout.read_tracker(folder)
    iteration = step if step is not None else tracker.iteration
    place = folder / (layout.RELEASE if iteration is None else layout.iteration_name(iteration))
    files = [place / layout.COMMON_FILE, *sorted(place.glob(f"mp_rank_*/{layout.RANK_FILE}"))]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        # The loader says what is wrong with it, or takes another one.
        return {}
    content = read_torch_file(file)
    found = content.get("args") if isinstance(content, dict) else None
    return vars(found) if hasattr(found, "__dict__") else {}


def check(args: Namespace, source: ModelSource, world_size: int) -> None:
    """Check the flags of a model that they describe, before anything is loaded; others are checked with its files.

    Raises:
        UserError: sizes do not fit together, or not the ranks.
    """
    if args.num_layers is not None and args.model_from_hf is None:
        from mindspeed_llm.tasks.inference.adapters.megatron_arguments import for_inference

        for_inference(args, world_size)
    elif source.kind == "mcore" and args.model_from_hf is None and args.hidden_size is not None:
        raise UserError(
            "--num-layers is missing, while --hidden-size is given; give all sizes of the model, or none to take them "
            "from the checkpoint"
        )
