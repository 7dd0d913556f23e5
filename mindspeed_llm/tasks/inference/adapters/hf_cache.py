"""Keys and values of texts for transformers' attention, each text at its own place.

The shapes of the tensors below: S slots of the cache, L positions of a slot, R rows of a batch, W new tokens of a row,
H heads of keys and values, D their size.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.backend import Batch

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer of a model keeps of each token. `window`: so many tokens are seen, the token itself among them;
    None: all.
    """

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device
    window: int | None

    def bytes_per_token(self) -> int:
        """Of one slot."""
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class Plan:
    """Where the tokens of a batch belong in the cache, and what they see there; the same for all layers."""

    __slots__ = (
        "is_fresh", "is_level", "lowest", "positions", "rows", "slots", "source", "start", "targets", "used", "width",
    )  # fmt: skip

    def __init__(self, batch: Batch, device: torch.device) -> None:
        slots, starts, widths = list(batch.slots), list(batch.starts), list(batch.widths)
        rows, width = len(slots), max(widths)
        self.width: int = width
        self.used: int = max(start + filled for start, filled in zip(starts, widths, strict=True))
        """Positions of the batch's longest row after the call."""
        self.lowest: int = min(starts)
        self.is_level: bool = all(start == starts[0] for start in starts)
        """Whether all rows have their new tokens at the same positions."""
        self.is_fresh: bool = self.is_level and starts[0] == 0
        """Whether there is nothing before the new tokens, so that the cache need not be read."""
        self.start: int = starts[0]
        is_in_order = slots == list(range(slots[0], slots[0] + rows))
        self.rows: slice | None = slice(slots[0], slots[0] + rows) if is_in_order else None
        """The slots, where they are neighbours in order: what is read is then a view."""
        self.slots: Tensor | None = None if is_in_order else torch.tensor(slots).to(device)
        self.targets: tuple[Tensor, Tensor] | None = None
        """Else (slot, position) of each real token [n]; None where all rows are written as one block."""
        self.source: tuple[Tensor, Tensor] | None = None
        """(row, column) of each real token [n]; None: the only column of all rows."""
        if self.is_level:
            # What fills a shorter row up lies behind its end, where it is never seen.
            self.positions = torch.arange(starts[0], starts[0] + width).unsqueeze(0).to(device)
        else:
            columns = torch.arange(width)
            last = torch.tensor([start + filled - 1 for start, filled in zip(starts, widths, strict=True)])
            # What fills a row up takes the position of its last token: there may be no position behind that.
            positions = torch.minimum(torch.tensor(starts)[:, None] + columns, last[:, None])
            self.positions = positions.to(device)
        if is_in_order and self.is_level:
            return
        if width == 1:
            at = torch.tensor(starts)
            self.targets = torch.tensor(slots).to(device), at.to(device)
            return
        is_real = torch.arange(width) < torch.tensor(widths)[:, None]
        row, column = is_real.nonzero(as_tuple=True)
        self.source = row.to(device), column.to(device)
        self.targets = (
            torch.tensor(slots)[row].to(device),
            (torch.tensor(starts)[row] + column).to(device),
        )

    def first_seen(self, window: int | None) -> int:
        """No row sees a position before this one."""
        return 0 if window is None else max(0, self.lowest + 1 - window)

    def mask(self, window: int | None, dtype: torch.dtype, *, always: bool) -> Tensor | None:
        """What is added to the attention scores, [R or 1, 1, W, positions seen]; None where nothing need be, or
        causality alone. `always`: the attention does not know causality by itself.
        """
        if not always:
            if self.width == 1 and self.is_level:
                return None
            if self.is_fresh and (window is None or self.used <= window):
                return None
        query = self.positions[:, None, :, None]
        key = torch.arange(self.first_seen(window), self.used, device=query.device)
        unseen = key > query
        if window is not None:
            unseen |= key <= query - window
        return torch.zeros(unseen.shape, dtype=dtype, device=query.device).masked_fill_(unseen, torch.finfo(dtype).min)


class KeyValueCache(TransformersCache):
    """`backend.Cache` that is handed to transformers' models: `begin` says which rows come, then `update` is called by
    each layer.

    A layer with a window keeps all positions too: what a text shares with another can then be cut at any place.
    """

    def __init__(self, layers: Sequence[Layer], slots: int, length: int) -> None:
        super().__init__(layers=[])
        self.slots, self.length = slots, length
        self._windows = [layer.window for layer in layers]
        try:
            # Zeros, not what the memory held: places behind a shorter row are read, with weight 0.
            self._keys = [_zeros(layer, slots, length, layer.key_size) for layer in layers]
            self._values = [_zeros(layer, slots, length, layer.value_size) for layer in layers]
        except (RuntimeError, MemoryError) as error:
            size = sum(layer.bytes_per_token() for layer in layers) * slots * length
            raise UserError(
                f"no memory for the keys and values of {slots} texts of {length} tokens ({size / 2**30:.2f} GiB): "
                f"{str(error).splitlines()[0]}. Take a smaller batch or shorter texts"
            ) from error
        self._plan: Plan | None = None

    def begin(self, plan: Plan) -> None:
        """The rows of the coming forward pass."""
        self._plan = plan

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Keep the new keys and values, [R, H, W, D], of a layer; returns those that the rows see, [R, H, seen, D]."""
        plan = self._plan
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        _write(keys, key_states, plan)
        _write(values, value_states, plan)
        if plan.is_fresh:
            return key_states, value_states
        first = plan.first_seen(self._windows[layer_idx])
        if plan.rows is not None:
            return keys[plan.rows, :, first : plan.used], values[plan.rows, :, first : plan.used]
        return (
            keys[:, :, first : plan.used].index_select(0, plan.slots),
            values[:, :, first : plan.used].index_select(0, plan.slots),
        )

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """See `backend.Cache`."""
        pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not pairs or not length:
            return
        device = self._keys[0].device
        old, new = (torch.tensor(column).to(device) for column in zip(*pairs, strict=True))
        for tensor in (*self._keys, *self._values):
            part = tensor[:, :, :length]
            part.index_copy_(0, new, part.index_select(0, old))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Filled positions before the new tokens; only asked for where all rows have the same."""
        return 0 if self._plan is None else self._plan.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(positions that `update` returns, the first of them); only asked for where no mask is needed."""
        first = self._plan.first_seen(self._windows[layer_idx])
        return self._plan.used - first, first

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Positions of a slot."""
        return self.length


def _zeros(layer: Layer, slots: int, length: int, size: int) -> Tensor:
    return torch.zeros(slots, layer.heads, length, size, dtype=layer.dtype, device=layer.device)


def _write(stored: Tensor, new: Tensor, plan: Plan) -> None:
    if plan.targets is None:
        stored[plan.rows, :, plan.start : plan.start + plan.width] = new
    elif plan.source is None:
        stored[plan.targets[0], :, plan.targets[1]] = new[:, :, 0]
    else:
        row, column = plan.source
        stored[plan.targets[0], :, plan.targets[1]] = new[row, :, column]


class _Recorder(TransformersCache):
    """Notes the keys and values that a model's layers would keep."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        self.seen.setdefault(layer_idx, []).append((key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class NoKeyValueCache(Exception):
    """A model keeps something else of a text than keys and values of each token; says what."""


def layer_types(model: PreTrainedModel) -> list[str]:
    """The kind of attention of each layer, as transformers' own masks follow from a configuration.

    Fields that the model's code does not read may stand in its configuration all the same.
    """
    config = model.config.get_text_config()
    count = config.num_hidden_layers
    module = sys.modules[type(model).__module__]
    if getattr(config, "layer_types", None) is not None and ".layer_types" in inspect.getsource(module):
        return list(config.layer_types)[:count]
    if getattr(config, "sliding_window", None) is not None and hasattr(module, "create_sliding_window_causal_mask"):
        return [SLIDING] * count
    if getattr(config, "attention_chunk_size", None) is not None and hasattr(module, "create_chunked_causal_mask"):
        return ["chunked_attention"] * count
    return [FULL] * count


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model's forward takes a cache.

    Raises:
        NoKeyValueCache: it takes none, or knows nothing of positions or masks.
    """
    known = set(inspect.signature(model.forward).parameters)
    name = next((name for name in ("cache", "past_key_values") if name in known), None)
    if name is None or "position_ids" not in known or not getattr(model, "_supports_attention_backend", False):
        raise NoKeyValueCache(f"{type(model).__name__} takes no cache of keys and values with positions of its rows")
    return name


@torch.no_grad()
def find_layers(model: PreTrainedModel, device: torch.device) -> list[Layer]:
    """What each layer of `model` keeps, found by a forward pass over one token.

    Raises:
        NoKeyValueCache: see there.
    """
    name = cache_argument(model)
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False) or config.is_encoder_decoder:
        raise NoKeyValueCache(f"{type(model).__name__} has a state that is no cache of keys and values")
    types = layer_types(model)
    if other := sorted(set(types) - {FULL, SLIDING}):
        raise NoKeyValueCache(f"{type(model).__name__} has layers of {', '.join(other)}")
    recorder = _Recorder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    model(input_ids=token, position_ids=torch.zeros_like(token), use_cache=True, **{name: recorder})
    layers = []
    for number, kind in enumerate(types):
        calls = recorder.seen.pop(number, [])
        if len(calls) != 1 or any(t.ndim != 4 or t.shape[0] != 1 or t.shape[2] != 1 for t in calls[0]):
            raise NoKeyValueCache(f"layer {number} of {type(model).__name__} keeps no keys and values of its own")
        keys, values = calls[0]
        layers.append(
            Layer(
                heads=keys.shape[1],
                key_size=keys.shape[3],
                value_size=values.shape[3],
                dtype=keys.dtype,
                device=keys.device,
                window=config.sliding_window if kind == SLIDING else None,
            )
        )
    if recorder.seen:
        raise NoKeyValueCache(f"{type(model).__name__} has more caches than layers")
    return layers
