"""A LoRA adapter that is open: what it says about itself, and its tensors under their Hugging Face names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.boxes import identity, whole
from mindspeed_llm.tasks.checkpoint.layout import Topology
from mindspeed_llm.tasks.checkpoint.lora import RANK, Place, adapter_family, places, split_name
from mindspeed_llm.tasks.checkpoint.model import HfTensor, Model, bind
from mindspeed_llm.tasks.checkpoint.plan import Target
from mindspeed_llm.tasks.checkpoint.slabs import assemble
from mindspeed_llm.tasks.checkpoint.sources import Source
from mindspeed_llm.tasks.checkpoint.tables import Family
from mindspeed_llm.tasks.checkpoint.verify import kind

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What adapters are stored in."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter. Its tensors go by the names of PEFT, see `lora`.

    A running job loads its rank's share with `plan.rank_targets(adapter.model(topology), rank, adapter.source)`.
    """

    folder: Path
    rank: int
    alpha: float
    base: Family
    """The family of the model that it is for,"""
    settings: Mapping[str, Any]
    """and that model's settings."""
    places: tuple[Place, ...]
    """Where it is, in the form in which it is stored."""
    source: Source
    topology: Topology
    """How a Megatron checkpoint is split; PEFT's files are not."""
    in_megatron: bool
    """Whether it is stored as a Megatron checkpoint."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank

    @property
    def targets(self) -> list[str]:
        """The values of `--lora-target-modules` that describe it."""
        return targets_of(self.places)

    def model(self, topology: Topology, form: Sequence[Place] | None = None) -> Model:
        """The adapter's tensors under a topology, in another form where one is given.

        Raises:
            UserError: the topology cannot be.
        """
        return adapter_model(self.base, self.settings, self.rank, self.places if form is None else form, topology)

    @cached_property
    def tensors(self) -> dict[str, HfTensor]:
        """All of its tensors by name."""
        return self.model(self.topology).hf_tensors()

    @cached_property
    def weights(self) -> set[str]:
        """The tensors of the model that it changes."""
        return {found.weight for name in self.tensors if (found := split_name(name)) is not None}


def adapter_model(
    base: Family, settings: Mapping[str, Any], rank: int, chosen: Sequence[Place], topology: Topology
) -> Model:
    """The tensors of an adapter on the `chosen` places of a model.

    Raises:
        UserError: the topology cannot be.
    """
    return bind(adapter_family(base, tuple(chosen)), dict(settings) | {RANK: rank}, topology)


def targets_of(chosen: Iterable[Place]) -> list[str]:
    """The names of places for `--lora-target-modules`."""
    return sorted({place.target for place in chosen})


def modules_of(chosen: Iterable[Place]) -> set[str]:
    """The Hugging Face modules that places are for, relative to the layer."""
    return {module for place in chosen for module in place.modules}


def summary(adapter: Adapter, *, merged: bool) -> dict[str, Any]:
    """What a report says of an adapter. `weights` are the kinds of the model's tensors that it is for (names that
    differ in numbers only), and how many there are of each; an adapter is on all of a kind that the model has.
    """
    return {
        "folder": str(adapter.folder.resolve()),
        "merged": merged,
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "targets": adapter.targets,
        "weights": dict(sorted(Counter(kind(name) for name in adapter.weights).items())),
    }


def check_one_form(chosen: Sequence[Place], where: str) -> None:
    """Refuse two adapters on one layer: on a fused layer, and on a part of it.

    Raises:
        UserError: names both.
    """
    for index, place in enumerate(chosen):
        for other in chosen[:index]:
            both = set(place.modules) & set(other.modules)
            if both and place.b.when == other.b.when and None in (place.section, other.section):
                raise UserError(f"{where}: {other.name} and {place.name} are both adapters on {min(both)}; keep one")


def in_form(adapter: Adapter, targets: Sequence[str]) -> tuple[Place, ...]:
    """The places with which `--lora-target-modules` describes an adapter, perhaps in another form: fused where each
    part has its own adapter, or the other way. Reads values, to see whether a fused layer can hold them.

    Raises:
        UserError: the names are not those of all layers that the adapter is on, or parts of a fused layer do not share
            their A.
    """
    modules = modules_of(adapter.places)
    kept = {(place.name, place.b.when) for place in adapter.places}
    chosen = tuple(
        place
        for place in places(adapter.base)
        if place.target in targets
        and ((place.name, place.b.when) in kept or (place.section is None and set(place.modules) <= modules))
    )
    flag = f"--lora-target-modules {' '.join(targets)}"
    if strange := set(targets) - set(targets_of(chosen)):
        raise UserError(f"{flag}: {adapter.folder} has no adapter on all of {min(strange)}; it has {_has(adapter)}")
    check_one_form(chosen, flag)
    model = adapter.model(adapter.topology, chosen)
    check_complete(adapter, model, flag)
    known = adapter.model(adapter.topology).written_copies
    for name, of in model.written_copies.items():
        if known.get(name) == of or torch.equal(values(adapter, name), values(adapter, of)):
            continue
        raise UserError(
            f"{flag}: {name} and {of} in {adapter.folder} differ, and a fused layer has one A for all of its parts; "
            f"give the names per projection: {' '.join(_per_projection(adapter))}"
        )
    return chosen


def check_complete(adapter: Adapter, model: Model, why: str) -> None:
    """Refuse to lose a part of an adapter.

    Args:
        model: what it will be.
        why: what is responsible where that lacks something.

    Raises:
        UserError: it has a tensor that `model` lacks; names it.
    """
    found = model.hf_tensors().keys()
    left_out = {name for name in adapter.tensors if name not in found and model.why_absent(name) is None}
    if left_out:
        raise UserError(f"{why}: {min(left_out)} of {adapter.folder} would be left out; it has {_has(adapter)}")


def _has(adapter: Adapter) -> str:
    return "adapters on " + ", ".join(sorted(modules_of(adapter.places)))


def _per_projection(adapter: Adapter) -> list[str]:
    modules = modules_of(adapter.places)
    single = [place for place in places(adapter.base) if len(place.modules) == 1 and place.section is None]
    return targets_of(place for place in single if set(place.modules) <= modules)


def values(adapter: Adapter, name: str) -> torch.Tensor:
    """One of its tensors in full."""
    tensor = adapter.tensors[name]
    return assemble(as_target(tensor, adapter.source), whole(tensor.view), adapter.source)


def as_target(tensor: HfTensor, source: Source) -> Target:
    """A tensor of a source as it is, for `assemble`."""
    return Target(
        key=tensor.name,
        shape=tensor.shape,
        view=tensor.view,
        dtype=source.dtype(tensor.name),
        pieces=((tensor.name, identity(tensor.view)),),
    )
