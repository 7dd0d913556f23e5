"""Which adapter a conversion is about, and whether the flags agree with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.adapter import Adapter, as_target, modules_of, targets_of
from mindspeed_llm.tasks.checkpoint.adapter_reader import (
    base_key,
    check_replicas,
    has_adapter,
    has_base,
    open_adapter,
    topology_of_adapter,
)
from mindspeed_llm.tasks.checkpoint.layout import Topology
from mindspeed_llm.tasks.checkpoint.lora import places
from mindspeed_llm.tasks.checkpoint.merge import check_same
from mindspeed_llm.tasks.checkpoint.mg_reader import MgDirectory, padded_rows
from mindspeed_llm.tasks.checkpoint.model import HfTensor, bind
from mindspeed_llm.tasks.checkpoint.peft_files import is_peft, open_peft
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.tasks.checkpoint.slabs import assemble, slabs
from mindspeed_llm.tasks.checkpoint.sources import MgSource, Source
from mindspeed_llm.tasks.checkpoint.tables import Family

Check = Callable[[Source, Mapping[str, HfTensor], bool], None]
"""Compares values, given the model that the adapter is merged into (its source, its tensors), and whether in full."""


_WHAT_TO_GIVE = (
    "To merge it, give --lora-r (its rank), or, where it stands alone, the model in --load-dir and it in --lora-load. "
    "To convert it alone, add --save-lora-to-hf for PEFT's files, or --lora-target-modules for a Megatron adapter"
)


@dataclass(frozen=True, kw_only=True)
class OpenAdapter:
    """An adapter, and how to see whether its files are what they should be."""

    adapter: Adapter
    check_replicas: Callable[[], None] | None = None
    check_base: Check | None = None
    """Of weights that stand beside it."""


def refuse_unwanted(request: ConversionRequest) -> None:
    """Refuse an input with an adapter of which the flags say nothing, or one too many.

    Raises:
        UserError: says what to give.
    """
    if request.lora_load is not None:
        raise UserError(
            f"--load-dir {request.load_dir} holds an adapter, too; leave --lora-load out to convert that one, or give "
            "a folder without an adapter"
        )
    if not request.wants_lora:
        raise UserError(f"--load-dir {request.load_dir} holds a LoRA adapter. {_WHAT_TO_GIVE}")


def refuse_unclear(request: ConversionRequest) -> None:
    """Refuse an input that is an adapter alone where the flags do not say that the output shall be one, too.

    Raises:
        UserError: says what to give.
    """
    if not (request.save_lora_to_hf if request.save_model_type == "hf" else request.lora_target_modules):
        raise UserError(f"--load-dir {request.load_dir} holds a LoRA adapter and no model. {_WHAT_TO_GIVE}")


def open_wanted(
    request: ConversionRequest,
    family: Family,
    settings: Mapping[str, Any],
    directory: MgDirectory | None = None,
    topology: Topology | None = None,
    *,
    alone: bool = False,
) -> OpenAdapter | None:
    """The adapter that a request is about; None where it is about none.

    Args:
        family: of the model that it is for.
        settings: of that model.
        directory: `--load-dir`, where that has an adapter in a Megatron checkpoint,
        topology: and its topology.
        alone: the output will be an adapter, too.

    Raises:
        UserError: there is none, it cannot be converted, or flags contradict it.
    """
    if not request.wants_lora:
        return None
    folder = request.lora_load
    if folder is None and directory is None and not is_peft(request.load_dir):
        raise UserError(
            f"--load-dir {request.load_dir} holds no adapter; give the folder of one in --lora-load, or leave the LoRA "
            "flags out"
        )
    if folder is not None and folder.resolve() == request.load_dir.resolve():
        raise UserError(f"--lora-load {folder} is --load-dir; leave it out to convert the adapter in --load-dir")
    if folder is not None and not folder.is_dir():
        raise UserError(f"--lora-load {folder}: expected a folder with PEFT's files, or with a Megatron checkpoint")
    if is_peft(folder or request.load_dir):
        if request.save_lora_to_hf:
            raise UserError(f"--save-lora-to-hf: {folder} holds PEFT's files already; copy them")
        found = OpenAdapter(adapter=open_peft(folder or request.load_dir, family, settings))
    elif folder is None:
        assert directory is not None and topology is not None
        found = _in_megatron(request, directory, family, settings, topology)
    else:
        found = _apart(request, MgDirectory(folder), family, settings)
    _check_flags(request, found.adapter, alone)
    if type(found.adapter.alpha) not in (int, float) or not math.isfinite(found.adapter.alpha):
        raise UserError(
            f"{found.adapter.folder}: its arguments say lora_alpha {found.adapter.alpha!r}; expected a number. Give "
            "--lora-alpha, the one that it was trained with, after removing it from the arguments"
        )
    return replace(found, check_replicas=partial(_check_values, found))


def _check_values(found: OpenAdapter) -> None:
    """Refuse an adapter that would make the model's weights no numbers, and one whose files contradict each other."""
    adapter = found.adapter
    for name, tensor in adapter.tensors.items():
        target = as_target(tensor, adapter.source)
        for box in slabs(target):
            values = assemble(target, box, adapter.source)
            if not values.isfinite().all():
                raise UserError(
                    f"{adapter.folder}: {name} holds {float(values[~values.isfinite()][0])}; expected finite numbers. "
                    "The training diverged, or the file is damaged: take an earlier checkpoint, or copy it again"
                )
    if found.check_replicas is not None:
        found.check_replicas()


def _in_megatron(
    request: ConversionRequest,
    directory: MgDirectory,
    family: Family,
    settings: Mapping[str, Any],
    topology: Topology,
) -> OpenAdapter:
    adapter = open_adapter(directory, family, settings, topology, alpha=request.lora_alpha)
    return OpenAdapter(
        adapter=adapter, check_replicas=partial(check_replicas, directory, adapter.model(adapter.topology))
    )


def _apart(
    request: ConversionRequest, directory: MgDirectory, family: Family, settings: Mapping[str, Any]
) -> OpenAdapter:
    if not has_adapter(directory):
        raise UserError(
            f"--lora-load {request.lora_load}: {directory.folder} has no lora_A and lora_B among its keys; expected "
            "the checkpoint of a LoRA training"
        )
    topology = topology_of_adapter(directory, {})
    found = _in_megatron(request, directory, family, settings, topology)
    if not has_base(directory):
        return found

    def check(base: Source, tensors: Mapping[str, HfTensor], full: bool) -> None:
        view = directory.view(base_key)
        padded = topology.padded_vocab_size or padded_rows(view, topology, settings["vocab_size"])
        try:
            own = MgSource(view, bind(family, settings, replace(topology, padded_vocab_size=padded)))
        except UserError as error:
            raise UserError(
                f"--lora-load {request.lora_load} holds weights beside its adapter, but they are no model that could "
                f"be compared with --load-dir: {error}"
            ) from None
        check_same(own, base, tensors, full=full, folder=str(directory.folder), load_dir=str(request.load_dir))

    return replace(found, check_base=check)


def _check_flags(request: ConversionRequest, adapter: Adapter, alone: bool) -> None:
    for flag, given, found in (
        ("--lora-r", request.lora_r, adapter.rank),
        ("--lora-alpha", request.lora_alpha, adapter.alpha),
    ):
        if given not in (None, found):
            raise UserError(f"{flag} {given} contradicts {adapter.folder}, whose is {found}; leave the flag out")
    given = set(request.lora_target_modules)
    if not given or (alone and request.save_model_type == "mg"):
        return  # then they say the form of the output, see `adapter.in_form`
    if adapter.in_megatron:
        agree = given == set(adapter.targets)
    else:
        # PEFT's files have no form of Megatron: any names do that mean the same layers.
        modules = modules_of(adapter.places)
        meant = [place for place in places(adapter.base) if place.target in given and modules >= set(place.modules)]
        agree = modules_of(meant) == modules and targets_of(meant) == sorted(given)
    if not agree:
        raise UserError(
            f"--lora-target-modules {' '.join(sorted(given))} contradicts {adapter.folder}, which has adapters on "
            f"{' '.join(adapter.targets)}; leave the flag out"
        )
