"""Putting adapters on a model that is built, and freezing everything else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from mindspeed_llm.core.config import LlmConfig
from mindspeed_llm.core.lora.grouped_experts import LoraGroupedExperts, add_adapters
from mindspeed_llm.core.lora.halves import Cut, Halves
from mindspeed_llm.core.lora.linear import Linear, LoraLinear, Rows, cut_of
from mindspeed_llm.core.lora.local_layers import without_graph
from mindspeed_llm.core.lora.local_learning import local_rules
from mindspeed_llm.core.lora.local_settings import LocalSettings
from mindspeed_llm.core.lora.settings import LAYERS, PARTS, LoraSettings
from mindspeed_llm.core.moe.grouped_experts import GroupedExperts


def attach(chunks: Sequence[nn.Module], settings: LoraSettings, local: LocalSettings | None = None) -> set[str]:
    """Freeze models of this rank and put adapters on their layers; returns the targets that were found here.

    Layers of the model are `decoder.layers`; embedding, output layer and routers have no adapters. Those of layers that
    `local` is for have no gradients.
    """
    found: set[str] = set()
    for chunk in chunks:
        chunk.requires_grad_(False)
        num_local = 0
        for position, layer in enumerate(chunk.decoder.layers):  # type: ignore[union-attr,arg-type]
            if isinstance(layer, TransformerLayer):
                found |= _attach_to_layer(layer, settings)
                if local is not None and _number(layer) <= local.final_layer:
                    num_local = position + 1
                    for module in layer.modules():
                        if isinstance(module, LoraLinear):
                            module.learn_locally(settings.seed)
        if num_local:
            without_graph(chunk.decoder, num_local)  # type: ignore[arg-type]
        elif chunk.pre_process:
            chunk.embedding.register_forward_hook(_begin_graph)  # type: ignore[union-attr]
    return found


def adapter_parameters(chunk: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model's adapters by name: those with gradients, and those with local updates."""
    local = {id(each) for rule in local_rules([chunk]) for half in rule.halves for each in (half.a, half.b)}
    return {name: each for name, each in chunk.named_parameters() if each.requires_grad or id(each) in local}


@contextlib.contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which models compute what they do without their adapters."""
    adapted = [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, LoraLinear | LoraGroupedExperts)
    ]
    before = [module.enabled for module in adapted]
    try:
        for module in adapted:
            module.enabled = False
        yield
    finally:
        for module, enabled in zip(adapted, before, strict=True):
            module.enabled = enabled


def _begin_graph(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Have gradients asked for from the embedding on: recomputation, and the schedule behind a stage without adapters,
    do nothing for inputs that need none.
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _number(layer: TransformerLayer) -> int:
    """Of a layer as the model's weights count them: from 0, without noop layers."""
    config: LlmConfig = layer.config
    position = layer.layer_number - 1
    return position - sum(noop < position for noop in config.noop_layers)


def _attach_to_layer(layer: TransformerLayer, settings: LoraSettings) -> set[str]:
    number = _number(layer)
    found: set[str] = set()
    for name, module in list(layer.named_modules()):
        if isinstance(module, GroupedExperts):
            found.update(add_adapters(module, settings, f"layers.{number}.{name}"))
        elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
            parent, _, leaf = name.rpartition(".")
            parts = settings.parts_of(leaf) if leaf in LAYERS else ()
            if parts:
                owner = layer.get_submodule(parent)
                found.update(_adapt(owner, leaf, module, parts, settings, _unique(layer, parent, number)))
    return found


def _unique(layer: TransformerLayer, parent: str, number: int) -> str:
    """The name of a module in the whole model: experts by their number there."""
    words = parent.split(".")
    if "local_experts" in words:
        at = words.index("local_experts")
        experts = layer.get_submodule(".".join(words[:at]))
        first = experts.ep_group.rank() * experts.num_local_experts  # type: ignore[union-attr,operator]
        words[at : at + 2] = [str(first + int(words[at + 1]))]
    return f"layers.{number}." + ".".join(words)


def _adapt(
    owner: nn.Module, leaf: str, base: Linear, parts: tuple[str, ...], settings: LoraSettings, name: str
) -> tuple[str, ...]:
    rows = _rows(owner, leaf, base)
    cut = cut_of(base)

    def halves(part: str, outputs: int) -> Halves:
        return Halves(
            f"{name}.{part}",
            seed=settings.seed,
            rank=settings.rank,
            inputs=base.weight.shape[1],
            outputs=outputs,
            like=base.weight,
            cut=Cut(axis=cut.axis, index=cut.index, count=cut.count, group=cut.group),
        )

    gated = leaf == "linear_fc1" and rows is not None
    if parts == (leaf,):
        fused = halves(leaf, base.weight.shape[0])
        adapted = LoraLinear(base, fused=fused, scale=settings.scale, gated=gated)
    elif rows is None:
        return ()  # an MLP without gate has no parts
    else:
        own = {PARTS[leaf].index(part): part for part in parts}
        made = {index: halves(part, rows.groups * rows.widths[index]) for index, part in own.items()}
        for index, part in own.items():
            owner.add_module(part, made[index])
        adapted = LoraLinear(base, parts=made, rows=rows, scale=settings.scale, gated=gated)
    setattr(owner, leaf, adapted)
    return parts


def _rows(owner: nn.Module, leaf: str, base: Linear) -> Rows | None:
    """What the rows of a layer are made up of on this rank; None where there is but one part."""
    config: LlmConfig = base.config
    if leaf == "linear_qkv":
        groups = config.num_query_groups // base.tp_group.size()
        width = config.kv_channels
        queries = config.num_attention_heads // config.num_query_groups
        return Rows(groups=groups, widths=(queries * width, width, width))
    if leaf == "linear_fc1" and config.gated_linear_unit:
        half = base.weight.shape[0] // 2
        return Rows(groups=1, widths=(half, half))
    return None
