"""`backend.Backend` over a transformers model: whole on each rank, or one copy sharded over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.platform import distributed
from mindspeed_llm.tasks.inference.adapters.hf_angles import AnglesCache, angle_borders
from mindspeed_llm.tasks.inference.adapters.hf_cache import (
    SLIDING,
    KeyValueCache,
    Layer,
    NoKeyValueCache,
    Plan,
    cache_argument,
    find_layers,
    layer_types,
)
from mindspeed_llm.tasks.inference.backend import Batch, Cache

logger = get_logger(__name__)

_MASKLESS = "sdpa"
"""The attention of transformers that knows causality without a mask."""
_UNBOUNDED = 1 << 20
"""`max_length` of a model whose configuration names no number of positions (recurrent ones)."""
_FOR_MANY, _FOR_FEW = "grouped_mm", "batched_mm"
"""Ways of transformers to compute a mixture's experts: for many tokens, and for a few on an accelerator, where it is
the faster one."""
_NAMES_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NAMES_OF_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "moe_top_k")
"""What configurations call the number of experts, and of those that a token goes to."""


class HFBackend:
    """See `backend.Backend`. A model whose state is no cache of keys and values computes each text anew with every
    token, and a line of the log says so.

    Args:
        model: on its device, in eval mode; fully_shard may have been applied.
        is_sharded: all ranks of the job share one copy: they make the same calls and get rank 0's logits.
    """

    def __init__(self, model: PreTrainedModel, *, device: torch.device, is_sharded: bool = False) -> None:
        config = model.config.get_text_config()
        self.model, self.device = model, device
        self.vocab_size: int = config.vocab_size
        self.max_length: int = getattr(config, "max_position_embeddings", None) or _UNBOUNDED
        self._angle_borders = angle_borders(config)
        self._is_sharded = is_sharded and distributed.world_size() > 1
        self.replica = 0 if self._is_sharded else distributed.rank()
        self.replicas = 1 if self._is_sharded else distributed.world_size()
        self.is_first_of_replica = not self._is_sharded or distributed.rank() == 0
        self._wanted: Tensor | None = None
        head = model.get_output_embeddings()
        self._picks_before_head = head is not None
        if head is not None:
            head.register_forward_pre_hook(self._pick)
        self._switches_experts = (
            device.type != "cpu"
            and type(model)._can_set_experts_implementation()
            and _FOR_MANY in model.get_experts_implementation().values()
        )
        self._experts = _FOR_MANY
        self._few = _few_rows(config)
        self._layers = self._find_layers()

    def new_cache(self, slots: int, length: int) -> Cache:
        """See `Backend`."""
        if length > self.max_length:
            raise UserError(
                f"texts of {length} tokens: {type(self.model).__name__} has {self.max_length} positions "
                "(max_position_embeddings in its config.json); take shorter texts"
            )
        if self._layers is None:
            return _TokenCache(slots, length)
        keys = KeyValueCache(self._layers, slots, length)
        borders = [border for border in self._angle_borders if border < length]
        return AnglesCache(keys, borders) if borders else keys

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """See `Backend`."""
        # Inference mode spares the bookkeeping of views and writes, some per cent of a small model's step. fully_shard
        # keeps tensors from one call to the next, which must not be bound to it.
        with torch.no_grad() if self._is_sharded else torch.inference_mode():
            if not isinstance(cache, AnglesCache):
                return self._forward(batch, cache)
            logits = torch.empty(len(batch.wanted), self.vocab_size, device=self.device)
            for part, places in cache.parts(batch):
                logits[places] = self._forward(part, cache.keys)[: len(places)]
            return logits

    def _forward(self, batch: Batch, cache: Cache) -> Tensor:
        if isinstance(cache, _TokenCache):
            logits = self._logits(cache.whole_texts(batch), batch.starts, batch.wanted)
        else:
            assert isinstance(cache, KeyValueCache), "made by new_cache"
            plan = Plan(batch, self.device)
            cache.begin(plan)
            if self._switches_experts:
                self._choose_experts(_FOR_FEW if plan.width == 1 and len(batch.slots) <= self._few else _FOR_MANY)
            logits = self._logits(
                batch.tokens[:, : plan.width],
                None,
                batch.wanted,
                attention_mask=self._masks(plan),
                position_ids=plan.positions,
                use_cache=True,
                **{self._cache_argument: cache},
            )
        if self._is_sharded:
            # The same numbers come out on every rank, but only if its machine is the same.
            dist.broadcast(logits, src=0)
        return logits

    def _logits(
        self, tokens: Tensor, shifts: Sequence[int] | None, wanted: Sequence[tuple[int, int]], **arguments: object
    ) -> Tensor:
        """[len(wanted), vocab_size]; the columns of `wanted` stand `shifts` further right in `tokens`."""
        width = tokens.shape[1]
        flat = [row * width + column + (shifts[row] if shifts else 0) for row, column in wanted]
        everything = flat == list(range(tokens.numel()))
        self._wanted = None if everything else torch.tensor(flat).to(self.device)
        logits = self.model(input_ids=tokens.to(self.device), **arguments).logits
        if not self._picks_before_head:
            logits = self._picked(logits)
        return logits.reshape(len(flat), -1)[:, : self.vocab_size].float().contiguous()

    def _choose_experts(self, way: str) -> None:
        if way != self._experts:
            self.model.set_experts_implementation(way)
            self._experts = way

    def _pick(self, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The head is a good part of a small model: it need not run for tokens that nobody asks about."""
        return self._picked(inputs[0]), *inputs[1:]

    def _picked(self, values: Tensor) -> Tensor:
        if self._wanted is None:
            return values
        return values.reshape(-1, values.shape[-1]).index_select(0, self._wanted).unsqueeze(0)

    def _find_layers(self) -> list[Layer] | None:
        try:
            layers = find_layers(self.model, self.device)
            self._cache_argument = cache_argument(self.model)
        except NoKeyValueCache as reason:
            logger.info("Each new token takes a forward pass over its whole text: %s", reason)
            return None
        config = self.model.config.get_text_config()
        self._windows = {
            kind: config.sliding_window if kind == SLIDING else None for kind in dict.fromkeys(layer_types(self.model))
        }
        self._mask_dtype = layers[0].dtype
        self._needs_mask = self.model.config._attn_implementation != _MASKLESS
        return layers

    def _masks(self, plan: Plan) -> Tensor | dict[str, Tensor | None] | None:
        masks = {
            kind: plan.mask(window, self._mask_dtype, always=self._needs_mask) for kind, window in self._windows.items()
        }
        # Not every model whose layers are all alike takes a mask for each kind of them.
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _few_rows(config: PretrainedConfig) -> int:
    """The most tokens at once that are few for a mixture: the way for a few copies the weights of an expert for each
    token that goes there, and copies no more than all experts together.
    """
    experts, per_token = (
        next((value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0), None)
        for names in (_NAMES_OF_EXPERTS, _NAMES_OF_CHOSEN)
    )
    return 1 if experts is None or per_token is None else max(1, experts // per_token)


class _TokenCache:
    """The texts themselves, for models that keep no keys and values; see `backend.Cache`."""

    def __init__(self, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self._texts: list[list[int]] = [[] for _ in range(slots)]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """See `backend.Cache`."""
        texts = [self._texts[source][:length] for source in sources]
        for target, text in zip(targets, texts, strict=True):
            self._texts[target] = text

    def whole_texts(self, batch: Batch) -> Tensor:
        """Add the new tokens and give the rows' texts from their beginning, filled up on the right with token 0."""
        texts = []
        for row, width, slot, start in zip(batch.tokens.tolist(), batch.widths, batch.slots, batch.starts, strict=True):
            self._texts[slot] = self._texts[slot][:start] + row[:width]
            texts.append(torch.tensor(self._texts[slot]))
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
