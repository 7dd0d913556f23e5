"""Complete arguments of the Megatron backend for a toy directory, as the command line would give them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.tasks.checkpoint.families import of_config
from mindspeed_llm.tasks.checkpoint.hf_reader import read_config
from mindspeed_llm.tasks.models.hf_arguments import hf_arguments
from mindspeed_llm.training.arguments.parser import parse
from mindspeed_llm.training.arguments.validate import validate

# What a run needs beside its model; the padded vocabulary is the smallest that every topology of the tests divides.
_FLAGS = (
    *("--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--train-iters", "1", "--lr", "1e-3", "--mock-data"),
    *("--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", "none"),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--attention-softmax-in-fp32"),
    *("--make-vocab-size-divisible-by", "4", "--moe-router-load-balancing-type", "none"),
)


def megatron_args(
    folder: Path, *, world_size: int = 1, flags: Sequence[str] = (), features: Sequence[Any] = FEATURES, **values: Any
) -> Namespace:
    """The arguments of a run with the model in `folder`.

    Args:
        folder: a Hugging Face directory; its config.json decides the model's structure.
        world_size: ranks of the run.
        flags: words of the command line, besides those above.
        features: whose flags there are.
        values: arguments to set, by name, after the structure is.
    """
    args = parse([*_FLAGS, *flags], features)
    config = read_config(folder)
    family = of_config(config, str(folder))
    noops = values.get("noop_layers", args.noop_layers) or ()
    found = hf_arguments(family, config, str(folder / "config.json"), noop_layers=noops)
    # The auxiliary losses are a matter of training: off unless a test asks for them.
    found.pop("moe_aux_loss_coeff", None)
    vars(args).update({**found, **values})
    args.given = tuple({*args.given, *found, *values})
    validate(args, world_size)
    FeaturesManager(features).validate(args)
    return args
