"""Whether tensors that Megatron holds once, and Hugging Face checkpoints twice, are the same indeed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from mindspeed_llm.tasks.checkpoint.boxes import Box, identity
from mindspeed_llm.tasks.checkpoint.model import HfTensor, Model
from mindspeed_llm.tasks.checkpoint.plan import Plan, Target
from mindspeed_llm.tasks.checkpoint.slabs import assemble, slabs
from mindspeed_llm.tasks.checkpoint.sources import Source

_BYTES = 2**20
_PARTS = 4
_SEED = 0


def say_lost_values(plan: Plan, model: Model, source: Source, *, full: bool) -> Plan:
    """The plan, with the reason of each dropped copy that is none: what it holds is lost.

    Args:
        model: the output's.
        full: compare all values, instead of some parts of each tensor.
    """
    tensors = model.hf_tensors()
    changed = {}
    for name in plan.dropped.keys() & model.written_copies.keys():
        other = model.written_copies[name]
        if {name, other} <= source.names() and _differ(tensors[name], tensors[other], source, full):
            changed[name] = f"differs from {other}, and Megatron holds one of the two: ITS VALUES ARE LOST"
    return replace(plan, dropped=plan.dropped | changed)


def _differ(tensor: HfTensor, other: HfTensor, source: Source, full: bool) -> bool:
    mine, theirs = _target(tensor, source), _target(other, source)
    if mine.dtype != theirs.dtype or mine.view != theirs.view:
        return True
    return any(
        not torch.equal(assemble(mine, part, source), assemble(theirs, part, source)) for part in _parts(mine, full)
    )


def _parts(target: Target, full: bool) -> Iterator[Box]:
    parts = list(slabs(target, _BYTES))
    if full or len(parts) <= _PARTS:
        yield from parts
    else:
        yield from random.Random(_SEED).sample(parts, _PARTS)


def _target(tensor: HfTensor, source: Source) -> Target:
    return Target(
        key=tensor.name,
        shape=tensor.shape,
        view=tensor.view,
        dtype=source.dtype(tensor.name),
        pieces=((tensor.name, identity(tensor.view)),),
    )
