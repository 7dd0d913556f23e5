"""Complete arguments of a small model, through the command line's own parser and checks."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.training.arguments.parser import parse
from mindspeed_llm.training.arguments.validate import validate

_MODEL = (
    "--num-layers 4 --hidden-size 24 --ffn-hidden-size 40 --num-attention-heads 3 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --lr 1e-3 --mock-data "
    "--vocab-size 101 --seed 5 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2"
)


def arguments(flags: str = "", *, world_size: int = 1, manager: FeaturesManager | None = None) -> Namespace:
    """The arguments of `flags` on the small model, as a run of `world_size` ranks sees them."""
    args = parse([*_MODEL.split(), *flags.split()], FEATURES)
    validate(args, world_size)
    (manager or FeaturesManager(FEATURES)).validate(args)
    return args
