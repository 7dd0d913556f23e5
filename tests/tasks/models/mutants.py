"""Deliberate faults in the rules of numbers of models, each a patch of the one place that holds the rule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock


@contextlib.contextmanager
def unscaled_rope() -> Iterator[None]:
    """Frequencies of rotary positions are not stretched."""
    from mindspeed_llm.core import rotary

    original = rotary.rotary_frequencies
    with mock.patch.object(
        rotary,
        "rotary_frequencies",
        lambda dim, base, scaling: (original(dim, base, None)[0], original(dim, base, scaling)[1]),
    ):
        yield


@contextlib.contextmanager
def no_rope_factor() -> Iterator[None]:
    """Cosines and sines of YaRN are not multiplied."""
    from mindspeed_llm.core import gpt_model

    with mock.patch.object(gpt_model, "_tell_factor", lambda config, factor: None):
        yield


@contextlib.contextmanager
def swapped_gate_and_up() -> Iterator[None]:
    """Up stands before gate."""
    from mindspeed_llm.tasks.checkpoint.rules import Joined, StackedExperts

    joined, stacked = Joined.place, StackedExperts.place

    def swapped(self: Any, parts: Any, share: Any) -> Any:
        return joined(self, parts[::-1] if len(parts) == 2 else parts, share)

    def swapped_pairs(self: Any, parts: Any, share: Any) -> Any:
        if self.fan_in == 2:
            parts = [part for index in range(0, len(parts), 2) for part in (parts[index + 1], parts[index])]
        return stacked(self, parts, share)

    with mock.patch.object(Joined, "place", swapped), mock.patch.object(StackedExperts, "place", swapped_pairs):
        yield


@contextlib.contextmanager
def swapped_key_and_value() -> Iterator[None]:
    """In each group the value head stands before the key head."""
    from mindspeed_llm.tasks.checkpoint.rules import GroupedQkv

    original = GroupedQkv.place
    with mock.patch.object(
        GroupedQkv, "place", lambda self, parts, share: original(self, (parts[0], parts[2], parts[1]), share)
    ):
        yield


@contextlib.contextmanager
def ungrouped_query_heads() -> Iterator[None]:
    """Query heads are dealt out to the KV groups in turns, instead of one run after the other."""
    import torch
    from megatron.core.transformer.attention import SelfAttention

    original = SelfAttention.get_query_key_value_tensors

    def shuffled(self: Any, *arguments: Any, **options: Any) -> Any:
        query, key, value = original(self, *arguments, **options)
        heads, groups = query.shape[2], key.shape[2]
        order = torch.arange(heads).view(groups, -1).t().flatten()
        return query[:, :, order], key, value

    with mock.patch.object(SelfAttention, "get_query_key_value_tensors", shuffled):
        yield


@contextlib.contextmanager
def expert_order() -> Iterator[None]:
    """The experts of a rank are read in the wrong order."""
    from mindspeed_llm.tasks.checkpoint import model

    original = model.expert_range
    with mock.patch.object(model, "expert_range", lambda *arguments: original(*arguments)[::-1]):
        yield


@contextlib.contextmanager
def unmasked_padding() -> Iterator[None]:
    """Padding of the vocabulary takes part in the softmax."""
    from mindspeed_llm.core.gpt_model import LlmGptModel

    with mock.patch.object(LlmGptModel, "_without_padding", lambda self, module, inputs, output: output):
        yield


@contextlib.contextmanager
def window_off_by_one() -> Iterator[None]:
    """A query sees one position more."""
    from mindspeed_llm.core.attention import CoreAttention

    original = CoreAttention.__init__

    def wider(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self._seen_before = None if self._seen_before is None else self._seen_before + 1

    with mock.patch.object(CoreAttention, "__init__", wider):
        yield


@contextlib.contextmanager
def normalised_router() -> Iterator[None]:
    """The weights of the chosen experts sum to one, whatever the model says."""
    from mindspeed_llm.core.moe.router import Router

    original = Router.routing

    def normalised(self: Any, logits: Any, padding_mask: Any = None) -> Any:
        probabilities, chosen = original(self, logits, padding_mask)
        return probabilities / probabilities.sum(-1, keepdim=True), chosen

    with mock.patch.object(Router, "routing", normalised):
        yield


@contextlib.contextmanager
def ungated_shared_expert() -> Iterator[None]:
    """The shared expert is not weighed by its gate."""
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    with mock.patch.object(SharedExpertMLP, "forward", lambda self, hidden: MLP.forward(self, hidden)[0]):
        yield


@contextlib.contextmanager
def whole_experts_as_dense_layers() -> Iterator[None]:
    """Gradients of whole experts under tensor parallelism are not summed over tensor parallel ranks."""
    from mindspeed_llm.core.moe import sequential_experts

    def of_dense_layers(experts: Any, config: Any) -> None:
        for parameter in experts.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1

    with mock.patch.object(sequential_experts, "mark_experts", of_dense_layers):
        yield


@contextlib.contextmanager
def norms_not_summed() -> Iterator[None]:
    """Under sequence parallelism each rank keeps its own gradient of norms."""
    from mindspeed_llm.core import norm

    with mock.patch.object(norm, "_mark", lambda module, config: None):
        yield


@contextlib.contextmanager
def auxiliary_losses_of_own_tokens() -> Iterator[None]:
    """Auxiliary losses enter with the number of this rank's tokens, as in megatron-core."""
    from megatron.core.transformer.moe.router import TopKRouter

    from mindspeed_llm.core.moe.router import Router

    with (
        mock.patch.object(Router, "attach_and_log_load_balancing_loss", TopKRouter.attach_and_log_load_balancing_loss),
        mock.patch.object(Router, "apply_z_loss", TopKRouter.apply_z_loss),
    ):
        yield


MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    mutant.__name__: mutant
    for mutant in (
        unscaled_rope,
        no_rope_factor,
        swapped_gate_and_up,
        swapped_key_and_value,
        ungrouped_query_heads,
        expert_order,
        unmasked_padding,
        window_off_by_one,
        normalised_router,
        ungated_shared_expert,
        whole_experts_as_dense_layers,
        norms_not_summed,
        auxiliary_losses_of_own_tokens,
    )
}
