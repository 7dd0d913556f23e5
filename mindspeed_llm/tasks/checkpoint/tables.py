"""The vocabulary in which a model family is described: data only, see `families` for the descriptions.

A family says which Megatron tensors exist, of which Hugging Face tensors each is made, and by which rule. Names of
layers are given without their prefix; `{expert}` and `{local}` stand for an expert's index in the layer and on the
rank. Shapes are given in words (see `dimensions`):

    Hf("self_attn.q_proj.weight", "(heads head_dim) hidden")

is a matrix of two dimensions, the first of which is seen as heads times head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_llm.tasks.checkpoint.fields import Settings, Spec
from mindspeed_llm.tasks.checkpoint.rules import Rule

Select = Mapping[int, int | str | tuple[str, str]]
"""Axis of a view -> the one index to take (a number, or "expert"), or the (start, stop) to take, in words."""


@dataclass(frozen=True, kw_only=True)
class Hf:
    """A Hugging Face tensor, or a section of one, as an operand of a rule."""

    name: str
    """Relative to the layer's prefix in tables of layers."""
    shape: str
    """Dimensions in words; several in parentheses are one dimension of the file, seen as their product."""
    select: Select = field(default_factory=dict)
    """The section to take; all, where empty."""
    order: tuple[int, ...] | None = None
    """The axes that are left, in the order in which the rule wants them ([out, in] for matrices)."""


def hf(name: str, shape: str, select: Select | None = None, order: tuple[int, ...] | None = None) -> Hf:
    """Short for `Hf`."""
    return Hf(name=name, shape=shape, select=select or {}, order=order)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One Megatron tensor (per layer, and per expert where its name says so) and what it is made of."""

    mg: str
    """Megatron's key; relative to the layer in tables of layers."""
    sources: tuple[Hf, ...]
    rule: Rule
    when: str = ""
    """The conditions under which the entry applies, see `conditions`."""
    keep_dtype: bool = False
    """`--params-dtype` leaves it alone: a buffer that training holds in its own precision."""

    @property
    def is_expert(self) -> bool:
        """Whether it is split like an expert, over EP and expert TP."""
        return any("{expert}" in source.name or "expert" in source.select.values() for source in self.sources)


def entry(mg: str, *sources: Hf, rule: Rule, when: str = "", keep_dtype: bool = False) -> Entry:
    """Short for `Entry`."""
    return Entry(mg=mg, sources=sources, rule=rule, when=when, keep_dtype=keep_dtype)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A Hugging Face tensor that repeats another one, which Megatron holds once."""

    name: str
    of: str
    shape: str
    when: str = ""
    written: bool = True
    """Whether checkpoints of the family have it, so that mg -> hf writes it."""


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Hugging Face tensors that Megatron has no place for."""

    pattern: str
    """A glob over whole names."""
    reason: str
    when: str = ""
    numbers: tuple[str, str] | None = None
    """(start, stop) in words: the pattern once for each number between, in the place of `{number}`."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A way to split that a family's model cannot be split in."""

    attribute: str
    """Of `Topology`."""
    most: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A way to store a model's parameters that no training model of the family has."""

    when: str
    """The conditions under which it is refused, see `conditions`."""
    flags: str
    """What the user asked for."""
    reason: str
    """And what to do."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that conversion knows about one model family."""

    ids: tuple[str, ...]
    """Values of `--model-type-hf`; the first is the one that is reported."""
    architectures: tuple[str, ...]
    """What config.json may say in `architectures`; the first is written."""
    model_type: str
    """`model_type` of config.json."""
    models: str
    """Which models these are, for people."""
    fields: tuple[Spec, ...]
    no_class: str = ""
    """Why transformers cannot load it without code of its own; empty where it has a class."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Settings that config.json does not say because the architecture has them always."""
    dimensions: Mapping[str, Callable[[Settings], int]] = field(default_factory=dict)
    """Words for shapes that only this family uses."""
    first: tuple[Entry, ...]
    """What the first stage holds besides layers."""
    last: tuple[Entry, ...]
    """What the last stage holds besides layers."""
    layer: tuple[Entry, ...]
    mtp: tuple[Entry, ...] = ()
    """What a multi-token prediction layer holds besides a layer; `{mtp}` is its number."""
    mtp_layer_conditions: Mapping[str, bool] = field(default_factory=dict)
    """Conditions that are fixed in MTP layers, whatever their index."""
    copies: tuple[Copy, ...] = ()
    mtp_copies: tuple[Copy, ...] = ()
    """Per MTP layer, relative to its prefix; `of` is a whole name."""
    layer_copies: tuple[Copy, ...] = ()
    """Per layer, MTP layers included, and per expert where `{expert}` is in the name; both names relative."""
    dropped: tuple[Dropped, ...] = ()
    limits: tuple[Limit, ...] = ()
    refused: tuple[Refused, ...] = ()
    layer_prefix: str = "model.layers.{layer}."
    mtp_prefix: str = "model.layers.{layer}."
    """Of MTP layer `{mtp}`; `{layer}` is the number of layers plus `{mtp}`."""
    mtp_ends_prefix: str | None = None
    """Prefix of what an MTP layer holds besides a layer, where that is not `mtp_prefix`."""
    mtp_pattern: str = ""
    """A glob over names that belong to MTP layers although they lack the prefix."""
    mg_layer_prefix: str = "decoder.layers.{local}."
    mg_mtp_prefix: str = "mtp.layers.{mtp}.transformer_layer."
    name_prefixes: Mapping[str, str] = field(
        default_factory=lambda: {"model.language_model.": "model.", "language_model.": ""}
    )
    """How names start in checkpoints that hold the model as a part of a larger one -> what the table calls it."""
