"""Opening the LoRA adapter in a Megatron checkpoint, which may hold the model beside it.

With an adapter on it, the weight of a layer stands at `X.base_layer.weight`, and the adapter at
`X.lora_A.default.weight` and `X.lora_B.default.weight` (`default` is PEFT's name for a model's one adapter). Grouped
experts keep theirs in `weight1_lora_a` and the like. Some versions of upstream write `lora_a` everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.adapter import FLOATS, Adapter, adapter_model, check_one_form, targets_of
from mindspeed_llm.tasks.checkpoint.boxes import Box, take
from mindspeed_llm.tasks.checkpoint.layout import Topology, ranks
from mindspeed_llm.tasks.checkpoint.lora import Place, places
from mindspeed_llm.tasks.checkpoint.mg_reader import MgDirectory, RankTensor, numbers, topology_of
from mindspeed_llm.tasks.checkpoint.model import Model
from mindspeed_llm.tasks.checkpoint.sources import MgSource, WithCopies
from mindspeed_llm.tasks.checkpoint.tables import Family

_OF_ADAPTER = re.compile(r"(^|[._])lora_")
_HALF = re.compile(r".+(\.lora_(?P<half>[AB])\.default\.weight|\.weight[12]_lora_(?P<grouped>[ab]))")
_SWAPPED = str.maketrans("ABab", "BAba")
# Dimensions that are the rank; the other tensors of grouped experts show it only times the number of experts.
_RANK_DIM = {".lora_A.default.weight": 0, ".lora_B.default.weight": 1, ".weight1_lora_b": 0, ".weight2_lora_a": 1}
_COPIES_APART = 1e-2
"""Of the largest value: how far copies of a matrix on several ranks may differ; a step of bfloat16 is less."""
_OTHER = {
    "lora_magnitude_vector": "is of DoRA, which is no sum of matrices; merge it where it was trained",
    "lora_embedding_": "is an adapter on an embedding, which has no table here; merge it where it was trained",
}


def base_key(key: str) -> str | None:
    """The key that a tensor of the model has without an adapter; None for a tensor of the adapter."""
    return None if _OF_ADAPTER.search(key) else key.replace(".base_layer.", ".")


def adapter_key(key: str) -> str | None:
    """The key of an adapter's tensor in one spelling; None for a tensor of the model."""
    if not _OF_ADAPTER.search(key):
        return None
    return re.sub(r"\.lora_([ab])\.", lambda found: f".lora_{found[1].upper()}.", key)


def has_adapter(directory: MgDirectory) -> bool:
    """Whether a checkpoint has tensors of an adapter."""
    return any(adapter_key(key) for file in directory.files() for model in file.models.values() for key in model)


def has_base(directory: MgDirectory) -> bool:
    """Whether a checkpoint has tensors of a model."""
    return any(base_key(key) for file in directory.files() for model in file.models.values() for key in model)


def topology_of_adapter(directory: MgDirectory, overrides: Mapping[str, Any]) -> Topology:
    """The topology of a checkpoint that may hold an adapter alone; as `topology_of`.

    A layer that has no adapter may have weights all the same, so noop layers are what the arguments say.
    """
    if not has_base(directory):
        overrides = {"noop_layers": numbers(directory.arguments.get("noop_layers")) or ()} | dict(overrides)
    return topology_of(directory.view(lambda key: base_key(key) or adapter_key(key)), overrides)


def open_adapter(
    directory: MgDirectory,
    family: Family,
    settings: Mapping[str, Any],
    topology: Topology,
    *,
    alpha: float | None = None,
) -> Adapter:
    """The adapter in a Megatron checkpoint; tensors of the model are not looked at.

    Args:
        family: of the model that it is for.
        settings: of that model.
        topology: of the checkpoint.
        alpha: `--lora-alpha`, needed where the checkpoint's arguments do not say it.

    Raises:
        UserError: half of an adapter is missing, ranks differ, it is on something that cannot have one, the model has
            another number of layers, or alpha is said by nobody or in two ways; names file and key.
    """
    said = directory.arguments.get("num_layers")
    if said is not None and said - len(topology.noop_layers) != settings["num_layers"]:
        raise UserError(
            f"{directory.folder} is an adapter for {said - len(topology.noop_layers)} layers, but the model has "
            f"{settings['num_layers']}; check that they belong together"
        )
    view = directory.view(adapter_key)
    rank, chosen, mtp_layers = _read_keys(view, family)
    if directory.arguments.get("lora_r") not in (None, rank):
        raise UserError(
            f"{directory.folder}: its tensors have rank {rank}, but its arguments say lora_r "
            f"{directory.arguments['lora_r']}; check that its files belong together"
        )
    topology = replace(topology, mtp_num_layers=mtp_layers, **_storage(chosen))
    model = adapter_model(family, settings, rank, chosen, topology)
    return Adapter(
        folder=directory.folder,
        rank=rank,
        alpha=_alpha(directory, alpha),
        base=family,
        settings=settings,
        places=chosen,
        source=WithCopies(MgSource(view, model), model.written_copies),
        topology=topology,
        in_megatron=True,
    )


def check_replicas(directory: MgDirectory, model: Model) -> None:
    """Compare what several ranks hold of an adapter: of a matrix that is not cut, only the first rank's is read.

    Training computes each copy anew; what rounding makes of that is let pass.

    Raises:
        UserError: copies differ by more; names both files.
    """
    view = directory.view(adapter_key)
    first: dict[tuple[str, Box], tuple[str, torch.Tensor]] = {}
    for rank in ranks(model.topology):
        file = view.file(rank, model.topology)
        for tensor in model.rank_tensors(rank):
            stored = file.models[tensor.chunk][tensor.key].view().view(tensor.view)
            for name, piece in tensor.pieces:
                found = piece.as_hf(take(stored, piece.mg_box)).float()
                where = f"{file.path}: {tensor.chunk}/{tensor.key}"
                known_where, known = first.setdefault((name, piece.hf_box), (where, found))
                apart, largest = (known - found).abs().max().item(), known.abs().max().item()
                if not apart <= _COPIES_APART * largest:
                    raise UserError(
                        f"{where} differs from {known_where}, of which it should be a copy, by up to {apart:.2g} (the "
                        f"largest value is {largest:.2g}); the ranks went apart in training, or the files are of "
                        "different iterations"
                    )


def _read_keys(view: MgDirectory, family: Family) -> tuple[int, tuple[Place, ...], int]:
    """The rank, the places, and the number of MTP layers that an adapter's keys and shapes show."""
    patterns = [
        (re.compile(re.escape(item.mg).replace(r"\{local\}", r"\d+")), index)
        for index, place in enumerate(places(family))
        for item in (place.b, place.a)
    ]
    found: set[int] = set()
    sizes: dict[int, str] = {}
    mtp = set()
    for file in view.files():
        for chunk, model in file.models.items():
            _check_halves(f"{file.path}: {chunk}", model)
            for key, tensor in model.items():
                where = f"{file.path}: {chunk}/{key}"
                inside = _inside_layer(key, family)
                matching = {index for pattern, index in patterns if inside and pattern.fullmatch(inside)}
                if not matching:
                    raise UserError(f"{where} {_why_unknown(key, family)}")
                if tensor.dtype not in FLOATS:
                    raise UserError(f"{where} is {tensor.dtype}; expected float32, bfloat16 or float16")
                found |= matching
                for end, dim in _RANK_DIM.items():
                    if key.endswith(end):
                        sizes.setdefault(tensor.shape[dim], where)
                if key.startswith("mtp."):
                    mtp.add(key.split(".")[2])
    if len(sizes) != 1:
        (one, first), (other, second), *_ = sizes.items()
        raise UserError(f"{first} has rank {one}, but {second} has rank {other}; expected one rank for all")
    chosen = tuple(place for index, place in enumerate(places(family)) if index in found)
    check_one_form(chosen, str(view.folder))
    return next(iter(sizes)), chosen, len(mtp)


def _storage(chosen: tuple[Place, ...]) -> dict[str, Any]:
    """The fields of `Topology` that the keys show, whatever the arguments say."""
    words = {word for place in chosen for word in place.b.when.split()}
    fields = {"mm_split": "mla_mm_split", "grouped": "moe_grouped_gemm"}
    found: dict[str, Any] = {
        field: word in words for word, field in fields.items() if (word in words) != (f"!{word}" in words)
    }
    return found | ({"transformer_impl": "local"} if "!te" in words else {})


def _inside_layer(key: str, family: Family) -> str | None:
    """The part of a key behind the prefix of its layer."""
    for prefix in (family.mg_layer_prefix, family.mg_mtp_prefix):
        start = re.match(re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(prefix)), key)
        if start is not None:
            return key[start.end() :]
    return None


def _check_halves(where: str, model: Mapping[str, RankTensor]) -> None:
    for key in sorted(model):
        if (found := _HALF.fullmatch(key)) is not None:
            start, end = found.span("half" if found["half"] else "grouped")
            other = key[:start] + key[start:end].translate(_SWAPPED) + key[end:]
            if other not in model:
                raise UserError(
                    f"{where}/{key} has no {other} beside it; an adapter is both: copy the checkpoint again"
                )


def _why_unknown(key: str, family: Family) -> str:
    for word, reason in _OTHER.items():
        if word in key:
            return reason
    if re.search(r"\.lora_[AB]\.(?!default\.weight$)", key):
        return "is of an adapter of another name, or no weight; expected lora_A.default.weight or lora_B.default.weight"
    return (
        f"is no adapter that a {family.ids[0]} model can have; it can have some on "
        f"{', '.join(targets_of(places(family)))}. Check --model-type-hf"
    )


def _alpha(directory: MgDirectory, given: float | None) -> float:
    said = directory.arguments.get("lora_alpha")
    if said is None and given is None:
        raise UserError(f"{directory.folder} does not say alpha in its arguments; give --lora-alpha")
    if said is not None and given not in (None, said):
        raise UserError(
            f"--lora-alpha {given} contradicts the arguments in {directory.folder}, which say {said}; leave it out"
        )
    return said if given is None else given
