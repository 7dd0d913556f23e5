"""Whether tensors that Megatron holds once, and Hugging Face checkpoints twice, are the same indeed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from mindspeed_llm.errors import UserError
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
    tensors = model.hf_tensors() | model.copy_tensors
    changed = {}
    for name in plan.dropped.keys() & model.copies.keys():
        other = model.copies[name]
        if {name, other} <= source.names() and _differ(tensors[name], tensors[other], source, full):
            changed[name] = f"differs from {other}, and Megatron holds one of the two: ITS VALUES ARE LOST"
    return replace(plan, dropped=plan.dropped | changed)


def refuse_second_head(plan: Plan, model: Model, source: Source) -> None:
    """Refuse an output layer that is another one than the embedding, of a model that says that it has one for both.

    transformers does not tie the two then, so that the one that was left out would be missed. All values are compared,
    whatever `--verify` says: nothing later would see it.

    Args:
        model: the output's.

    Raises:
        UserError: names both tensors, and what to do.
    """
    tensors = model.hf_tensors() | model.copy_tensors
    ends = {copy.name for copy in model.family.copies} & plan.dropped.keys() & model.copies.keys()
    for name in sorted(ends):
        other = model.copies[name]
        if {name, other} <= source.names() and _differ(tensors[name], tensors[other], source, full=True):
            raise UserError(
                f"{name} differs from {other}, but config.json says tie_word_embeddings true, one matrix for both; "
                f"set it to false to keep both, or remove {name} from the weights if it is not meant"
            )


def _differ(tensor: HfTensor, other: HfTensor, source: Source, full: bool) -> bool:
    mine, theirs = _target(tensor, source), _target(other, source)
    if mine.view != theirs.view:
        return True
    # One may be stored in a wider type, with the same values.
    wide = torch.promote_types(mine.dtype, theirs.dtype)
    return any(
        not torch.equal(assemble(mine, part, source).to(wide), assemble(theirs, part, source).to(wide))
        for part in _parts(mine, full)
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
