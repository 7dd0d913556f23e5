"""A model of the Megatron backend as a backend of generation: tensor, pipeline and expert parallel ranks in step."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.adapters.megatron_ranks import Copy
from mindspeed_llm.tasks.inference.backend import Batch, Cache

if TYPE_CHECKING:
    from mindspeed_llm.core.gpt_model import LlmGptModel


class MegatronBackend:
    """See `tasks.inference.backend.Backend`.

    The hidden states of a batch go from stage to stage; the last stage computes logits of the wanted tokens alone. One
    rank says what these are: others of its copy might differ in the last bit.
    """

    def __init__(self, model: LlmGptModel, args: Namespace, copy: Copy, *, on_close: Callable[[], None]) -> None:
        """Args:
        model: this rank's stage, filled.
        args: what it was built from, see `megatron_arguments.for_inference`.
        on_close: undoes what was set up in this process for the model.
        """
        from megatron.core import parallel_state

        from mindspeed_llm.core.key_value_cache import attention_layers
        from mindspeed_llm.platform.device import current_device

        self.vocab_size: int = args.vocab_size
        self.max_length: int = args.max_position_embeddings
        self.device = current_device()
        self.dtype: torch.dtype = model.config.params_dtype
        self.replica, self.replicas, self.is_first_of_replica = copy.number, copy.count, copy.is_first
        self._model, self._copy, self._on_close = model.eval().requires_grad_(False), copy, on_close
        self._layers, self._rotary = attention_layers(model), getattr(model, "rotary_pos_emb", None)
        stages = parallel_state.get_pipeline_model_parallel_group()
        self._stages = dist.get_process_group_ranks(stages)
        self._stage, self._stage_group = stages.rank(), stages
        # Of the ranks with logits the first: their numbers ascend from stage to stage.
        num_first = len(copy.ranks) // len(self._stages)
        self._source = copy.ranks[-num_first]
        self._shares_logits = len(copy.ranks) > parallel_state.get_tensor_model_parallel_world_size()

    def new_cache(self, slots: int, length: int) -> Cache:
        """See `Backend.new_cache` (a collective of the copy)."""
        from mindspeed_llm.core.key_value_cache import KeyValueCache

        config, cache, problem = self._model.config, None, ""
        heads = config.num_query_groups // config.tensor_model_parallel_size
        try:
            cache = KeyValueCache(
                len(self._layers),
                slots=slots,
                length=length,
                heads=heads,
                head_dim=config.kv_channels,
                dtype=config.params_dtype,
                device=self.device,
            )
        except RuntimeError as error:  # as torch's allocators say it
            problem = str(error).splitlines()[0]
        problems: list[str] = [""] * len(self._copy.ranks)
        dist.all_gather_object(problems, problem, group=self._copy.group)
        if found := next(filter(None, problems), None):
            size = 2 * len(self._layers) * slots * heads * (length + 1) * config.kv_channels
            size *= torch.finfo(config.params_dtype).bits // 8
            raise UserError(
                f"there is no memory for keys and values of {slots} texts of {length} tokens ({size / 2**30:.1f} GiB "
                f"on each rank): {found}. Take fewer texts at once, shorter ones, or more tensor or pipeline parallel "
                "ranks"
            )
        assert cache is not None
        return cache

    @torch.no_grad()
    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """See `Backend.forward` (a collective of the copy)."""
        from mindspeed_llm.core.key_value_cache import KeyValueCache, Rows, remembering

        assert isinstance(cache, KeyValueCache), "a cache of this backend"
        rows = Rows(
            slots=batch.slots,
            starts=batch.starts,
            widths=batch.widths,
            columns=batch.tokens.shape[1],
            length=cache.length,
            device=self.device,
        )
        with remembering(self._layers, self._rotary, cache, rows):
            hidden = self._through_stages(batch.tokens.to(self.device), rows.positions)
        return self._logits(hidden, batch.wanted)

    def _through_stages(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens and positions [R, S] -> this stage's hidden states [S, R, H]."""
        config = self._model.config
        if self._stage > 0:
            shape = (tokens.shape[1], tokens.shape[0], config.hidden_size)
            received = torch.empty(shape, dtype=config.pipeline_dtype, device=self.device)
            dist.recv(received, self._stages[self._stage - 1], group=self._stage_group)
            self._model.set_input_tensor(received)
        hidden = self._model.hidden_states(tokens, positions)
        if self._stage < len(self._stages) - 1:
            dist.send(hidden.contiguous(), self._stages[self._stage + 1], group=self._stage_group)
        return hidden

    def _logits(self, hidden: Tensor, wanted: Sequence[tuple[int, int]]) -> Tensor:
        """Hidden states [S, R, H] of the last stage -> logits [wanted, V] on all ranks of the copy."""
        if not wanted:
            return torch.empty(0, self.vocab_size, device=self.device)
        if self._stage == len(self._stages) - 1:
            rows, columns = (torch.tensor(numbers, device=self.device) for numbers in zip(*wanted, strict=True))
            logits = self._model.logits(hidden[columns, rows][:, None])[:, 0].float()
        else:
            logits = torch.empty(len(wanted), self.vocab_size, device=self.device)
        if self._shares_logits:
            logits = logits.contiguous()
            dist.broadcast(logits, self._source, group=self._copy.group)
        return logits

    def close(self) -> None:
        """Let go of what this process was given for the model (a collective); the backend is of no use afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group(self._copy.group)
        self._on_close()
