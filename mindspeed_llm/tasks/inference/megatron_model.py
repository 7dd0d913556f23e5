"""The arguments of a model of the Megatron backend, completed from what lies beside its weights."""

from __future__ import annotations

import logging
from argparse import Namespace

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.source import ModelSource

_LOG = logging.getLogger("mindspeed_llm")


def complete(args: Namespace, source: ModelSource) -> None:
    """Put the structure of the model into `args` where no flag gives it: from the config.json of a Hugging Face
    directory, or from the arguments that a checkpoint carries; and the tokenizer and adapters that these name.

    Raises:
        UserError: flags on the command line contradict what is found; a checkpoint cannot be read.
    """
    from mindspeed_llm.tasks.inference.adapters.megatron_checkpoint import apply_adapters, apply_checkpoint

    texts = []
    if source.kind == "hf" and args.num_layers is None and args.model_from_hf is None:
        args.model_from_hf = str(source.path)
    if args.model_from_hf is not None:
        from mindspeed_llm.training.arguments.model_from_hf import apply_model_from_hf

        texts.append(apply_model_from_hf(args))
    if source.kind == "mcore":
        texts.append(apply_checkpoint(args))
    if args.lora_load is not None:
        texts.append(apply_adapters(args))
    for text in filter(None, texts):
        _LOG.info("%s", text)


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
