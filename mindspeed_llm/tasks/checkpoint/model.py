"""A family's table applied to one model and one topology: the tensors of each rank, and the Hugging Face ones.

This is the seam for everything that moves weights: the converter, a training job that loads its own rank's share from a
Hugging Face directory, LoRA export. It knows shapes, names and places, and reads nothing.

    model = Model(family=family, settings=settings, topology=topology)
    for tensor in model.rank_tensors(Rank(tp=0, pp=1, ep=0)):
        for name, piece in tensor.pieces:  # piece.hf_box of Hugging Face tensor `name` is piece.mg_box of this tensor
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import dimensions
from mindspeed_llm.tasks.checkpoint.boxes import Box, Piece, whole
from mindspeed_llm.tasks.checkpoint.conditions import holds
from mindspeed_llm.tasks.checkpoint.layout import (
    Chunk,
    Rank,
    Topology,
    check_experts,
    expert_range,
    hf_layers,
    place,
)
from mindspeed_llm.tasks.checkpoint.rules import Part, Share
from mindspeed_llm.tasks.checkpoint.tables import Copy, Dropped, Entry, Family, Hf

_FLAGS = {"tp": "--target-tensor-parallel-size", "mtp_num_layers": "--mtp-num-layers"}
"""Field of `Topology` that a family may have a limit for -> what the user writes."""
_WHOLE_ON_A_RANK = {
    "num_attention_heads": "attention heads",
    "mamba_num_heads": "heads of the state space",
    "mamba_num_groups": "groups of the state space",
}
"""Setting -> what it counts, which no two tensor parallel ranks share."""


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    """The shape in which pieces are boxes."""
    keep_dtype: bool = False


@dataclass(frozen=True, kw_only=True)
class MgTensor:
    """A tensor of one rank of a Megatron checkpoint."""

    chunk: str
    """`model`, or `model0`, ... with virtual stages."""
    key: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    names: tuple[str, ...]
    """The Hugging Face tensors that it is made of; where all of it is padding, too, and there are no pieces."""
    pieces: tuple[tuple[str, Piece], ...]
    padding: Box | None = None
    keep_dtype: bool = False
    is_expert: bool = False
    """Of routed experts: what expert parallel ranks do not have in common."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where an entry of a table is applied: the prefixes of names, and what the conditions are asked about."""

    hf_prefix: str = ""
    mg_prefix: str = ""
    layer: int | None = None
    fixed: Mapping[str, bool] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model under one topology.

    Raises:
        UserError: (on first use) numbers that do not fit together, see `layout`.
    """

    family: Family
    settings: Mapping[str, Any]
    topology: Topology
    layers: list[int] = field(default_factory=list)
    """The Hugging Face layers that it has, in order; see `layout.hf_layers`."""

    @cached_property
    def chunks(self) -> list[Chunk]:
        """All chunks of all pipeline stages."""
        return place(self.topology, self.layers)

    @cached_property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, all ranks together."""
        tp, size = self.topology.tp, self.settings["vocab_size"]
        return self.topology.padded_vocab_size or -(-size // tp) * tp

    def rank_tensors(self, rank: Rank, *, only: Callable[[Entry], bool] | None = None) -> Iterator[MgTensor]:
        """The tensors of one rank, in the order of its file; `only` leaves out entries."""
        for chunk in self.chunks:
            if chunk.stage != rank.pp:
                continue
            for spot, entries in self._places(chunk):
                for item in entries:
                    if (only is None or only(item)) and self._applies(item, spot):
                        yield from self._tensors(item, spot, chunk, rank)

    def hf_tensors(self) -> dict[str, HfTensor]:
        """The tensors that the Hugging Face checkpoint of this model has, by name and in the order of its layers."""
        found: dict[str, HfTensor] = {}

        def add(source: Hf, spot: _Place, expert: int | None = None, keep_dtype: bool = False) -> None:
            tensor = self._hf_tensor(source.name, source.shape, spot, expert, keep_dtype=keep_dtype)
            known = found.setdefault(tensor.name, tensor)
            assert known == tensor, f"{tensor.name} is seen in two shapes: {known.view}, {tensor.view}"

        everywhere = [(spot, entries) for chunk in self.chunks for spot, entries in self._places(chunk)]
        # By layer, not by stage; what comes before all layers first, and what comes after them last.
        layers = sorted((pair for pair in everywhere if pair[0].layer is not None), key=lambda pair: pair[0].layer or 0)
        ends = [pair for pair in everywhere if pair[0].layer is None]
        for spot, entries in [*(p for p in ends if p[1] is self.family.first), *layers, *ends]:
            for item in entries:
                if not self._applies(item, spot):
                    continue
                for source in item.sources:
                    for expert in self._experts_named_by(source.name):
                        add(source, spot, expert, item.keep_dtype)
        found |= {tensor.name: tensor for tensor, _, written in self._copies() if written}
        return found

    @cached_property
    def copies(self) -> dict[str, str]:
        """Hugging Face tensors that repeat another: name -> name of the other."""
        return {tensor.name: of for tensor, of, _ in self._copies()}

    @cached_property
    def written_copies(self) -> dict[str, str]:
        """Those of them that checkpoints of the family have."""
        return {tensor.name: of for tensor, of, written in self._copies() if written}

    @cached_property
    def copy_tensors(self) -> dict[str, HfTensor]:
        """All copies as tensors, those that checkpoints of the family do not need to have, too."""
        return {tensor.name: tensor for tensor, _, _ in self._copies()}

    def why_absent(self, name: str) -> str | None:
        """Why a Hugging Face tensor has no place in this model; None where there is no reason, which is an error."""
        for rule in self.family.dropped:
            if holds(rule.when, self.settings, self.topology) and self._matches(name, rule):
                return rule.reason
        if name in self.copies:
            return f"a copy of {self.copies[name]}"
        for layer in range(self.settings["num_layers"]):
            if layer not in self.layers and name.startswith(self.family.layer_prefix.format(layer=layer)):
                return f"layer {layer} is left out"
        for mtp in range(self.topology.mtp_num_layers, self.settings.get("num_nextn_predict_layers") or 0):
            if name.startswith(self._mtp_place(mtp).hf_prefix) or fnmatchcase(name, self.family.mtp_pattern):
                return "MTP layers beyond --mtp-num-layers are left out"
        return None

    def check(self) -> None:
        """Refuse what cannot be, before anything is read or written.

        Raises:
            UserError: says which numbers disagree and what would do.
        """
        topology, settings = self.topology, self.settings
        check_experts(topology, settings.get("num_experts") or 0)
        for limit in self.family.limits:
            if (found := getattr(topology, limit.attribute)) > limit.most:
                raise UserError(
                    f"{self.family.ids[0]}: {_FLAGS[limit.attribute]} {found} is not possible, at most {limit.most}: "
                    f"{limit.reason}"
                )
        for refused in self.family.refused:
            if holds(refused.when, settings, topology):
                raise UserError(f"{self.family.ids[0]}: {refused.flags} is not possible: {refused.reason}")
        for name, things in _WHOLE_ON_A_RANK.items():
            count = settings.get(name)
            if count and count % topology.tp:
                raise UserError(
                    f"--target-tensor-parallel-size {topology.tp} does not divide the {count} {things}; expected a "
                    f"divisor of {count}"
                )
        available = settings.get("num_nextn_predict_layers") or 0
        if topology.mtp_num_layers > available:
            raise UserError(
                f"--mtp-num-layers {topology.mtp_num_layers}: the model has {available} MTP layers; expected 0 to "
                f"{available}"
            )
        if topology.mtp_num_layers and topology.transformer_impl == "transformer_engine":
            raise UserError(
                "--transformer-impl transformer_engine goes without --mtp-num-layers: no training model has both; "
                "leave one out"
            )
        if topology.mla_mm_split and "kv_lora_rank" not in settings:
            raise UserError(f"--mla-mm-split: {self.family.ids[0]} has no multi-head latent attention; leave it out")
        padded, tp = self.padded_vocab_size, topology.tp
        if padded < settings["vocab_size"] or padded % tp:
            raise UserError(
                f"--padded-vocab-size {padded}: expected a multiple of tensor parallel size {tp} of at least "
                f"{settings['vocab_size']}, the vocabulary"
            )
        _ = self.chunks

    # Where entries are applied

    def _places(self, chunk: Chunk) -> Iterator[tuple[_Place, tuple[Entry, ...]]]:
        ends = {"num_layers": self.settings["num_layers"]}
        if chunk.first:
            yield _Place(numbers=ends), self.family.first
        for local, layer in chunk.layers:
            yield (
                _Place(
                    hf_prefix=self.family.layer_prefix.format(layer=layer),
                    mg_prefix=self.family.mg_layer_prefix.format(local=local),
                    layer=layer,
                ),
                self.family.layer,
            )
        if chunk.last:
            for mtp in range(self.topology.mtp_num_layers):
                spot = self._mtp_place(mtp)
                yield spot, self.family.layer
                ends_prefix = self.family.mtp_ends_prefix
                around = spot.hf_prefix if ends_prefix is None else ends_prefix
                yield _Place(hf_prefix=around, numbers={"mtp": mtp}, layer=spot.layer), self.family.mtp
            yield _Place(numbers=ends), self.family.last

    def _mtp_place(self, mtp: int) -> _Place:
        layer = self.settings["num_layers"] + mtp
        return _Place(
            hf_prefix=self.family.mtp_prefix.format(layer=layer, mtp=mtp),
            mg_prefix=self.family.mg_mtp_prefix.format(mtp=mtp),
            layer=layer,
            fixed=self.family.mtp_layer_conditions,
            numbers={"mtp": mtp},
        )

    def _copies(self) -> Iterator[tuple[HfTensor, str, bool]]:
        """Each copy with the name of what it repeats, and whether checkpoints have it."""
        ends = [(copy, _Place()) for copy in self.family.copies]
        for mtp in range(self.topology.mtp_num_layers):
            ends += [(copy, self._mtp_place(mtp)) for copy in self.family.mtp_copies]
        for copy, spot in ends:
            if self._applies(copy, spot):
                yield self._hf_tensor(copy.name, copy.shape, spot, None), copy.of, copy.written
        if not self.family.layer_copies:
            return
        places = [place for chunk in self.chunks for place in self._places(chunk)]
        for spot in (spot for spot, entries in places if entries is self.family.layer):
            for copy in self.family.layer_copies:
                for expert in self._experts_named_by(copy.name) if self._applies(copy, spot) else ():
                    tensor = self._hf_tensor(copy.name, copy.shape, spot, expert)
                    yield tensor, self._name(copy.of, spot, expert), copy.written

    def _applies(self, item: Entry | Copy, spot: _Place) -> bool:
        return holds(item.when, self.settings, self.topology, spot.layer, spot.fixed)

    # From words to numbers

    def _name(self, name: str, spot: _Place, expert: int | None = None) -> str:
        return spot.hf_prefix + name.format(expert=expert, **spot.numbers)

    def _matches(self, name: str, rule: Dropped) -> bool:
        if rule.numbers is None:
            return fnmatchcase(name, rule.pattern)
        start, stop = (self._size(word) for word in rule.numbers)
        return any(fnmatchcase(name, rule.pattern.format(number=number)) for number in range(start, stop))

    def _size(self, word: str) -> int:
        return dimensions.value(word, self.settings, self.family.dimensions)

    @cached_property
    def _shapes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes in words -> shape and view. Many tensors have the same one: each is worked out once."""
        return {}

    def _hf_tensor(
        self, name: str, shape: str, spot: _Place, expert: int | None, *, keep_dtype: bool = False
    ) -> HfTensor:
        if shape not in self._shapes:
            sizes = [[self._size(word) for word in words] for words in dimensions.parse(shape)]
            whole_shape = tuple(math.prod(factors) for factors in sizes)
            self._shapes[shape] = whole_shape, tuple(size for factors in sizes for size in factors)
        whole_shape, view = self._shapes[shape]
        return HfTensor(name=self._name(name, spot, expert), shape=whole_shape, view=view, keep_dtype=keep_dtype)

    def _experts_named_by(self, name: str) -> list[int | None]:
        return list(range(self.settings["num_experts"])) if "{expert}" in name else [None]

    def _part(self, source: Hf, spot: _Place, expert: int | None) -> Part:
        tensor = self._hf_tensor(source.name, source.shape, spot, expert)
        dims = [dim for dim, words in enumerate(dimensions.parse(source.shape)) for _ in words]
        box = list(whole(tensor.view))
        visible = []
        for axis in range(len(box)):
            chosen = source.select.get(axis)
            if isinstance(chosen, tuple):
                box[axis] = (self._size(chosen[0]), self._size(chosen[1]))
            elif chosen is not None:
                index = expert if chosen == "expert" else int(chosen)
                assert index is not None, f"{source.name}: no expert is meant here"
                box[axis] = (index, index + 1)
                continue
            visible.append(axis)
        axes = source.order or tuple(visible)
        return Part(name=tensor.name, box=tuple(box), axes=axes, dims=_ranks([dims[axis] for axis in axes]))

    def _tensors(self, item: Entry, spot: _Place, chunk: Chunk, rank: Rank) -> Iterator[MgTensor]:
        if not item.is_expert:
            share = Share(index=rank.tp, count=self.topology.tp, padded_vocab_size=self.padded_vocab_size)
            parts = [self._part(source, spot, None) for source in item.sources]
            yield self._tensor(item, spot, chunk, parts, share)
            return
        count = self.topology.expert_tp
        share = Share(index=rank.tp if count > 1 else 0, count=count)
        mine = expert_range(self.topology, rank, self.settings["num_experts"])
        of_expert = [[self._part(source, spot, expert) for source in item.sources] for expert in mine]
        if "{local}" not in item.mg:
            parts = [part for parts in of_expert for part in parts]
            yield self._tensor(item, spot, chunk, parts, share)
            return
        for local, parts in enumerate(of_expert):
            yield self._tensor(item, spot, chunk, parts, share, local)

    def _tensor(
        self, item: Entry, spot: _Place, chunk: Chunk, parts: list[Part], share: Share, local: int | None = None
    ) -> MgTensor:
        placed = item.rule.place(parts, share)
        return MgTensor(
            chunk=chunk.key,
            key=spot.mg_prefix + item.mg.format(local=local, **spot.numbers),
            shape=placed.shape,
            view=placed.view,
            names=tuple(dict.fromkeys(part.name for part in parts)),
            pieces=placed.pieces,
            padding=placed.padding,
            keep_dtype=item.keep_dtype,
            is_expert=item.is_expert,
        )


def _ranks(dims: list[int]) -> tuple[int, ...]:
    """Dimension numbers of the other side, which has its dimensions in the order in which a rule wants them, and none
    that a selection removed.
    """
    order = list(dict.fromkeys(dims))
    return tuple(order.index(dim) for dim in dims)


def bind(
    family: Family,
    settings: Mapping[str, Any],
    topology: Topology,
    *,
    num_layers: int | None = None,
    first_k_dense: int | None = None,
) -> Model:
    """A checked `Model`; the last two arguments make it of fewer layers than the source has.

    Raises:
        UserError: what is asked for cannot be; says why.
    """
    dimensions.check(settings)
    dense = (settings.get("first_k_dense_replace") or 0) if settings.get("num_experts") else 0
    if first_k_dense is not None and not settings.get("num_experts"):
        raise UserError("--first-k-dense-replace: the model has no experts, all its layers are dense; leave it out")
    layers = hf_layers(settings["num_layers"], dense, num_layers=num_layers, first_k_dense=first_k_dense)
    model = Model(family=family, settings=settings, topology=topology, layers=layers)
    model.check()
    return model
