"""The arguments of a model of the Megatron backend, completed from what lies beside its weights."""

from __future__ import annotations

import contextlib
import json
import logging
from argparse import Namespace
from pathlib import Path

from mindspeed_llm.tasks.inference.source import ModelSource

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_SWITCHES = {"bfloat16": "bf16", "float16": "fp16"}
_LOG = logging.getLogger("mindspeed_llm")


def complete(args: Namespace, source: ModelSource) -> None:
    """Put the structure of the model into `args` where no flag gives it: from the config.json of a Hugging Face
    directory, or from the arguments that a checkpoint carries; and the tokenizer and adapters that these name.

    Raises:
        UserError: flags on the command line contradict what is found; a checkpoint cannot be read.
    """
    from mindspeed_llm.tasks.inference.adapters.megatron_checkpoint import apply_adapters, apply_checkpoint

    texts = []
    if source.kind == "hf":
        _take_dtype(args, source.path)
    if args.model_from_hf is not None or (source.kind == "hf" and not _is_described(args)):
        texts.append(_apply_config(args, source.path))
    if source.kind == "mcore":
        texts.append(apply_checkpoint(args))
    if args.lora_load is not None:
        texts.append(apply_adapters(args))
    for text in filter(None, texts):
        _LOG.info("%s", text)


def _apply_config(args: Namespace, folder: Path) -> str:
    """Put in the structure that config.json has, of `folder` where no flag names another; returns what was set."""
    from mindspeed_llm.training.arguments.model_from_hf import apply_model_from_hf
    from mindspeed_llm.training.folders import in_words_of

    if args.model_from_hf is not None:
        return apply_model_from_hf(args)
    args.model_from_hf = str(folder)
    with in_words_of({"--model-from-hf": "--load"}):
        return apply_model_from_hf(args).replace("--model-from-hf", "--load", 1)


def _take_dtype(args: Namespace, folder: Path) -> None:
    """On an accelerator the dtype that config.json has, where no flag says one, as the other backend does it."""
    from mindspeed_llm.platform.device import device_type

    if args.dtype != "auto" or device_type() == "cpu":
        return
    # A damaged file is refused where the weights are read.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = _SWITCHES.get(config.get("dtype") or config.get("torch_dtype"))
        if name is not None:
            setattr(args, name, True)


def _is_described(args: Namespace) -> bool:
    """Whether flags say all sizes that a model needs."""
    return all(getattr(args, name) is not None for name in _SIZES)


def check(args: Namespace, world_size: int) -> None:
    """Check the flags of a model that they describe, before anything is loaded; others are checked with their files.

    Raises:
        UserError: sizes do not fit together, or not the ranks.
    """
    if _is_described(args) and args.model_from_hf is None:
        from mindspeed_llm.tasks.inference.adapters.megatron_arguments import for_inference

        for_inference(args, world_size)
