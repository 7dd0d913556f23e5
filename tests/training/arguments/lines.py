"""A command line at toy size, and its arguments."""

from __future__ import annotations

import shlex
from argparse import Namespace

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.training.arguments.parser import parse
from mindspeed_llm.training.arguments.validate import validate

DENSE = (
    "--num-layers 4 --hidden-size 48 --ffn-hidden-size 88 --num-attention-heads 6 --group-query-attention "
    "--num-query-groups 2 --kv-channels 16 --vocab-size 509 --max-position-embeddings 256 --position-embedding-type "
    "rope --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --seq-length 32 "
    "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data"
)
EXPERTS = (
    "--num-experts 6 --moe-ffn-hidden-size 40 --moe-router-topk 2 --norm-topk-prob --moe-token-dispatcher-type alltoall"
)


def arguments(flags: str = "", *, world_size: int = 1, base: str = DENSE) -> Namespace:
    """The validated arguments of `base` with more flags, of which the last of each kind counts."""
    args = validate(parse(shlex.split(f"{base} {flags}"), FEATURES), world_size)
    FeaturesManager(FEATURES).validate(args)
    return args
