"""LoRA adapters as tables: which tensors an adapter of a family has, and of which Hugging Face tensors each is made.

A layer W [out, in] with an adapter computes W x + alpha / r * B A x, with A [r, in] and B [out, r]. What a family's
table says about W says all about A and B: B is cut like the rows of W, A like its columns. So a family's adapter is a
family again (`adapter_family`), and adapters are read, split and written like models.

    W    self_attention.linear_qkv.weight                 self_attn.q_proj.weight, k_proj, v_proj
    B    self_attention.linear_qkv.lora_B.default.weight  self_attn.q_proj.lora_B.weight, k_proj, v_proj
    A    self_attention.linear_qkv.lora_A.default.weight  self_attn.q_proj.lora_A.weight, which k_proj and v_proj repeat

That is the fused form, which upstream trains: an adapter on Megatron's linear layer, whose parts share one A. In the
form per projection each part has an adapter of its own, as PEFT has on a Hugging Face model:

    B    self_attention.linear_q.lora_B.default.weight    self_attn.q_proj.lora_B.weight
    A    self_attention.linear_q.lora_A.default.weight    self_attn.q_proj.lora_A.weight

Hugging Face names are those of PEFT without `base_model.model.` in front. Where a Hugging Face module has several
adapters, each on a section of its rows (the linear layers of `--mla-mm-split`, or gate and up where they are one
matrix), PEFT has no name for them; here the name of the Megatron layer stands between:
`q_b_proj.linear_qk_nope.lora_B`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from mindspeed_llm.tasks.checkpoint import dimensions
from mindspeed_llm.tasks.checkpoint.dimensions import Settings
from mindspeed_llm.tasks.checkpoint.rules import COLUMNS, ROWS, WHOLE, GroupedQkv, Joined, Rule, StackedExperts
from mindspeed_llm.tasks.checkpoint.tables import Copy, Entry, Family, Hf, Select, entry, hf

RANK = "lora_r"
"""The setting that is an adapter's rank; `lora_rank` in shapes."""
_WEIGHT = ".weight"
_QKV = GroupedQkv()
# The parts of Megatron's fused layers. In the order of the table,
_PARTS: dict[tuple[str, Rule], tuple[str, ...]] = {
    ("linear_qkv", _QKV): ("linear_q", "linear_k", "linear_v"),
    ("linear_fc1", ROWS): ("linear_fc1_gate", "linear_fc1_up"),
}
# or, of latent attention, by their Hugging Face module, and named like the layers of megatron-core.
_LATENT_PARTS = {
    "q_a_proj": "linear_q_down_proj",
    "q_proj": "linear_q_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
}
# Grouped experts hold the adapters of all experts of a rank in one tensor, stacked like their weights.
_GROUPED = {"weight1": "linear_fc1", "weight2": "linear_fc2"}
_NAME = re.compile(r"(?P<module>.+?)(?:\.(?P<section>linear_\w+))?\.lora_(?P<half>[AB])\.weight")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A linear layer of a family (per layer, and per expert) on which an adapter can be."""

    name: str
    """Megatron's module, relative to the layer: `self_attention.linear_qkv`."""
    target: str
    """Its name in `--lora-target-modules`."""
    modules: tuple[str, ...]
    """The Hugging Face modules that the adapter is for, relative to the layer."""
    section: Select | None
    """The part of the one module's view that the adapter is for, where others are for the rest."""
    b: Entry
    a: Entry
    copies: tuple[Copy, ...]
    """The A of modules that share the one of the first."""


def places(family: Family) -> tuple[Place, ...]:
    """All linear layers on which an adapter can be, in both forms. Under other conditions several have one name."""
    return tuple(place for item in family.layer for place in _of_entry(item))


def adapter_family(family: Family, chosen: tuple[Place, ...]) -> Family:
    """The family of adapters on the `chosen` of `places(family)`: a model of it is an adapter. Its settings are those
    of a model of `family`, and `RANK`.
    """
    words: dict[str, Callable[[Settings], int]] = {"lora_rank": lambda settings: settings[RANK]}
    for place in chosen:
        for chosen_range in (place.section or {}).values():
            if isinstance(chosen_range, tuple):
                words[_width(*chosen_range)] = _width_of(family, *chosen_range)
    return replace(
        family,
        dimensions=dict(family.dimensions) | words,
        first=(),
        last=(),
        layer=tuple(item for place in chosen for item in (place.b, place.a)),
        mtp=(),
        copies=(),
        mtp_copies=(),
        layer_copies=tuple(copy for place in chosen for copy in place.copies),
        dropped=(),
        refused=(),
    )


@dataclass(frozen=True, kw_only=True)
class AdapterName:
    """What the Hugging Face name of an adapter's tensor says."""

    weight: str
    """The tensor that the adapter is for."""
    half: str
    """A or B."""
    section: str | None = None
    """The Megatron layer whose section of the tensor it is for; None where it is for all of it."""

    def other(self) -> str:
        """The name of the other half."""
        return _name(self.weight, {"A": "B", "B": "A"}[self.half], self.section)


def split_name(name: str) -> AdapterName | None:
    """What a Hugging Face name says, if it is one of an adapter."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return AdapterName(weight=found["module"] + _WEIGHT, half=found["half"], section=found["section"])


def _of_entry(item: Entry) -> Iterator[Place]:
    stem, _, leaf = item.mg.removesuffix(_WEIGHT).rpartition(".")
    shapes = [dimensions.parse(source.shape) for source in item.sources]
    grouped = isinstance(item.rule, StackedExperts)
    if (
        not (grouped or (isinstance(item.rule, Joined | GroupedQkv) and item.mg.endswith(_WEIGHT)))
        or leaf == "router"
        or any(len(shape) != 2 for shape in shapes)
    ):
        return
    names = tuple(dict.fromkeys(source.name for source in item.sources))
    selected = any(source.select for source in item.sources)
    packed = len(names) == 1 and len(item.sources) > 1
    if not selected or packed:
        yield _fused(item, stem, leaf, names)
    if grouped:
        return
    if len(item.sources) > 1:
        parts = _PARTS.get((leaf, item.rule))
        for index, source in enumerate(item.sources):
            part = parts[index] if parts else _LATENT_PARTS.get(_module(source.name).rpartition(".")[2])
            if part is not None:
                yield _single(item, f"{stem}.{part}", source)
    elif selected:
        yield _single(item, f"{stem}.{leaf}", item.sources[0])


def _fused(item: Entry, stem: str, leaf: str, names: tuple[str, ...]) -> Place:
    """An adapter for all of a layer: the parts have their rows of B, and A in common."""
    if isinstance(item.rule, StackedExperts):
        by_columns = item.rule.split == 1
        b_rule: Rule = replace(item.rule, split=None if by_columns else item.rule.split)
        a_rule: Rule = replace(item.rule, fan_in=1, split=item.rule.split if by_columns else None)
        keys = (f"{stem}.{leaf}_lora_b", f"{stem}.{leaf}_lora_a")
    else:
        b_rule, a_rule = (WHOLE, COLUMNS) if item.rule == COLUMNS else (item.rule, WHOLE)
        keys = _keys(f"{stem}.{leaf}")
    a = hf(_name(names[0], "A"), f"lora_rank {_columns(item.sources[0])}")
    return Place(
        name=f"{stem}.{leaf}",
        target=_GROUPED.get(leaf, leaf),
        modules=tuple(_module(name) for name in names),
        section=None,
        b=entry(
            keys[0],
            *(hf(_name(source.name, "B"), f"{_rows(source)} lora_rank", source.select) for source in item.sources),
            rule=b_rule,
            when=item.when,
        ),
        a=entry(keys[1], a, rule=a_rule, when=item.when),
        copies=tuple(Copy(name=_name(name, "A"), of=a.name, shape=a.shape, when=item.when) for name in names[1:]),
    )


def _single(item: Entry, name: str, source: Hf) -> Place:
    """An adapter for one part of a layer. Its rows are cut plainly: heads of queries follow each other, and each rank
    has those of its groups.
    """
    target = name.rpartition(".")[2]
    section = target if source.select else None
    b_rule, a_rule = (WHOLE, COLUMNS) if item.rule == COLUMNS else (WHOLE if item.rule == WHOLE else ROWS, WHOLE)
    keys = _keys(name)
    b = hf(_name(source.name, "B", section), f"{_rows(source, source.select)} lora_rank")
    a = hf(_name(source.name, "A", section), f"lora_rank {_columns(source)}")
    return Place(
        name=name,
        target=target,
        modules=(_module(source.name),),
        section=source.select or None,
        b=entry(keys[0], b, rule=b_rule, when=item.when),
        a=entry(keys[1], a, rule=a_rule, when=item.when),
        copies=(),
    )


def _keys(name: str) -> tuple[str, str]:
    """Megatron's keys of B and A; `default` is PEFT's name of a model's one adapter."""
    return f"{name}.lora_B.default.weight", f"{name}.lora_A.default.weight"


def _name(weight: str, half: str, section: str | None = None) -> str:
    return f"{_module(weight)}{f'.{section}' if section else ''}.lora_{half}.weight"


def _module(weight: str) -> str:
    return weight.removesuffix(_WEIGHT)


def _rows(source: Hf, section: Select | None = None) -> str:
    """The rows of a matrix in words; only those of a section."""
    words = []
    for axis, word in enumerate(dimensions.parse(source.shape)[0]):
        chosen = (section or {}).get(axis)
        if chosen is None:
            words.append(word)
        elif isinstance(chosen, tuple):
            words.append(_width(*chosen))
    return f"({' '.join(words)})"


def _columns(source: Hf) -> str:
    return f"({' '.join(dimensions.parse(source.shape)[1])})"


def _width(start: str, stop: str) -> str:
    return f"{start}:{stop}"


def _width_of(family: Family, start: str, stop: str) -> Callable[[Settings], int]:
    def width(settings: Mapping[str, int]) -> int:
        return dimensions.value(stop, settings, family.dimensions) - dimensions.value(
            start, settings, family.dimensions
        )

    return width
