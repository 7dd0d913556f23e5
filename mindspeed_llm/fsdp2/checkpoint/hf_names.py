"""Which stored tensors make up which model parameter.

transformers holds modules in a layout that differs from the files for some families (the experts of a MoE layer are
one 3-D parameter in memory and one matrix per expert on disk) and declares the way from one to the other as data: a
list of renamings and converters per model type. `map_to_model` reads these declarations and turns them into lazy
tensors, so that a shard of a parameter can be read without the rest; `to_file_layout` follows them backwards for the
export.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.weight_files import Concatenated, LazyTensor, Stacked, Transposed, full_index


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """The tensors of a weight directory by the model's own names.

    `tensors` holds one entry per parameter and persistent buffer; `ignored` the stored names that the model's class
    declares as not needed; `aliases` maps a stored name to the tied parameter that another tensor already fills.
    """

    tensors: dict[str, LazyTensor]
    ignored: list[str] = field(default_factory=list)
    aliases: dict[str, tuple[LazyTensor, str]] = field(default_factory=dict)


class _ConvertedTensor:
    """One output of a conversion that cannot be sliced: the inputs are read whole, once for all outputs."""

    def __init__(self, group: _ConvertedGroup, name: str, meta: torch.Tensor, dtype: torch.dtype) -> None:
        self._group, self._name = group, name
        self.shape, self.dtype = tuple(meta.shape), dtype

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        return self._group.take(self._name)[index].clone()


class _ConvertedGroup:
    def __init__(
        self,
        model: PreTrainedModel,
        converter: WeightConverter,
        target: str,
        sources: Mapping[str, Sequence[tuple[str, LazyTensor]]],
    ) -> None:
        self._model, self._converter, self._target, self._sources = model, converter, target, sources
        self._values: dict[str, torch.Tensor] | None = None
        self._left: set[str] = set()

    def outputs(self) -> dict[str, LazyTensor]:
        first = next(iter(self._sources.values()))[0][1]
        meta = self._convert(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        return {name: _ConvertedTensor(self, name, tensor, first.dtype) for name, tensor in meta.items()}

    def take(self, name: str) -> torch.Tensor:
        if self._values is None:
            self._values = self._convert(lambda tensor: tensor.read(full_index(tensor.shape)))
            self._left = set(self._values)
        value = self._values[name]
        self._left.discard(name)
        if not self._left:
            self._values = None  # every output has been read: free the memory
        return value

    def _convert(self, read) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self._converter)
        for pattern, tensors in self._sources.items():
            for name, tensor in tensors:
                converter.add_tensor(self._target, name, pattern, read(tensor))
        values = converter.convert(self._target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}


def map_to_model(model: PreTrainedModel, stored: Mapping[str, LazyTensor]) -> ModelWeights:
    """Assign every stored tensor to the parameters and persistent buffers of `model` (which may be on meta).

    The list of conversions that were used is kept on the model, as transformers does itself, for the way back in the
    export.

    Raises:
        UserError: a parameter that no file fills, a tensor that nothing takes, or a shape that does not fit; names
            them.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()

    tensors: dict[str, LazyTensor] = {}
    origin: dict[str, str] = {}
    groups: dict[str, dict[str, list[tuple[str, LazyTensor]]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if pattern is None:
            tensors[target], origin[target] = stored[name], name
        else:
            groups[target][pattern].append((name, stored[name]))
    for target, sources in groups.items():
        converter = by_pattern[next(iter(sources))]
        for name, tensor in _convert_lazily(model, converter, target, sources).items():
            tensors[name], origin[name] = tensor, next(iter(sources.values()))[0][0]
    model._weight_conversions = [entry for entry in conversions if entry.was_used()]
    return _match(model, tensors, origin, state)


def record_conversions(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Keep on `model` the conversions that stored tensors of these names would need, as `map_to_model` does."""
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    for name in names:
        rename_source_key(name, renamings, converters, model.base_model_prefix, state)
    model._weight_conversions = [entry for entry in conversions if entry.was_used()]


def _convert_lazily(
    model: PreTrainedModel,
    converter: WeightConverter,
    target: str,
    sources: dict[str, list[tuple[str, LazyTensor]]],
) -> dict[str, LazyTensor]:
    absent = [pattern for pattern in converter.source_patterns if pattern not in sources]
    if absent:
        raise UserError(f"no tensor of the weight files matches {absent}, which {target} is made of")
    parts: list[list[LazyTensor]] = [[t for _, t in sources[pattern]] for pattern in converter.source_patterns]
    for operation in converter.operations:
        if type(operation) is MergeModulelist:
            parts = [[Stacked(tensors, operation.dim)] for tensors in parts]
        elif type(operation) is Concatenate and getattr(operation, "num_shards_attribute", None) is None:
            parts = [[Concatenated([tensor for tensors in parts for tensor in tensors], operation.dim)]]
        elif type(operation) is Transpose and not operation.check_dims:
            parts = [[Transposed(tensor, operation.dim0, operation.dim1) for tensor in tensors] for tensors in parts]
        else:
            return _ConvertedGroup(model, converter, target, sources).outputs()
    if len(converter.target_patterns) != 1 or len(parts) != 1 or len(parts[0]) != 1:
        return _ConvertedGroup(model, converter, target, sources).outputs()
    return {target: parts[0][0]}


def _match(
    model: PreTrainedModel,
    tensors: dict[str, LazyTensor],
    origin: dict[str, str],
    state: Mapping[str, torch.Tensor],
) -> ModelWeights:
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    aliases: dict[str, tuple[LazyTensor, str]] = {}
    ignored: list[str] = []
    unexpected: list[str] = []
    ignore = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    ignore.append(re.compile(r"rotary_emb\.inv_freq$"))  # written by transformers before version 4.31
    matched: dict[str, LazyTensor] = {}
    for target, tensor in tensors.items():
        canonical = tied.get(target, target)
        if target not in state and canonical not in state:
            names = ignored if any(pattern.search(target) for pattern in ignore) else unexpected
            names.append(origin[target])
        elif canonical != target and canonical in tensors:
            aliases[origin[target]] = (tensor, canonical)
        else:
            matched[canonical] = tensor
    wanted = [name for name in state if name not in tied]
    missing = [name for name in wanted if name not in matched]
    if missing or unexpected:
        lines = [f"model.model_name_or_path: the weights in the files do not fit {type(model).__name__}"]
        if missing:
            lines.append(f"no tensor fills {len(missing)} of its parameters: {_some(missing)}")
        if unexpected:
            lines.append(f"nothing takes {len(unexpected)} tensors of the files: {_some(unexpected)}")
        lines.append("check that config.json belongs to these weights")
        raise UserError("; ".join(lines))
    for name, tensor in matched.items():
        if tensor.shape != tuple(state[name].shape):
            raise UserError(
                f"model.model_name_or_path: {origin.get(name, name)} has shape {list(tensor.shape)}, but "
                f"{type(model).__name__} built from config.json expects {list(state[name].shape)} for {name}"
            )
    return ModelWeights(tensors=matched, ignored=ignored, aliases=aliases)


def to_file_layout(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse of `map_to_model`: tensors under the names and in the shapes of the files (works on meta too).

    `tensors` must hold all members of a conversion together (see `conversion_groups`).
    """
    return revert_weight_conversion(model, dict(tensors))


def conversion_groups(model: PreTrainedModel, names: Sequence[str]) -> list[list[str]]:
    """Split parameter names into the smallest groups that `to_file_layout` can convert on their own."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [entry.reverse_transform() for entry in conversions[::-1] if isinstance(entry, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        key = name
        for converter in reverse:
            renamed, pattern = converter.rename_source_key(name)
            if pattern is not None:
                key = renamed if len(converter.source_patterns) > 1 else name
                break
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, ... ({len(names) - 5} more)"
