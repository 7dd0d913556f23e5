"""The words of the `when` of a table's entries: when does a model, or one of its layers, have a tensor.

`"moe grouped !te"` means: the layer is a MoE layer, experts are stored grouped, and not under Transformer Engine's
names. A word is one of those below, or a setting (`qk_layernorm`), which counts as true unless it is absent, zero or
false.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_llm.tasks.checkpoint.layout import Topology

Settings = Mapping[str, Any]


def is_moe(settings: Settings, layer: int) -> bool:
    """Whether a layer (by its Hugging Face index) has experts instead of one MLP."""
    if not settings.get("num_experts"):
        return False
    frequency = settings.get("moe_layer_freq") or 1
    if isinstance(frequency, list):
        return bool(frequency[layer]) if layer < len(frequency) else True  # MTP layers
    if layer < (settings.get("first_k_dense_replace") or 0) or layer in (settings.get("mlp_only_layers") or ()):
        return False
    # Two ways to say "every n-th layer", which count from different ends.
    if layer % frequency:
        return False
    return (layer + 1) % (settings.get("decoder_sparse_step") or 1) == 0


def is_full_attention(settings: Settings, layer: int) -> bool:
    """Whether a layer has softmax attention, where other layers have a linear one."""
    interval = settings.get("full_attention_interval")
    return not interval or (layer + 1) % interval == 0


def has_indexer(settings: Settings, layer: int) -> bool:
    """Whether a layer has a sparse indexer of its own; others share the one of a layer before. MTP layers that the list
    of kinds does not reach have one.
    """
    kinds = settings.get("indexer_types") or ()
    return bool(settings.get("enable_dsa_indexer")) and (layer >= len(kinds) or kinds[layer] == "full")


LAYER_WORDS: dict[str, Callable[[Settings, int], bool]] = {
    "moe": is_moe,
    "dense": lambda settings, layer: not is_moe(settings, layer),
    "full_attention": is_full_attention,
    "indexer": has_indexer,
}
STORAGE_WORDS: dict[str, Callable[[Settings, Topology], bool]] = {
    "grouped": lambda _, topology: topology.moe_grouped_gemm,
    "te": lambda _, topology: topology.transformer_impl == "transformer_engine",
    "mm_split": lambda _, topology: topology.mla_mm_split,
    "pipelined": lambda _, topology: topology.pp > 1,
    "mtp": lambda _, topology: topology.mtp_num_layers > 0,
    "tied": lambda settings, _: not settings.get("untie_embeddings_and_output_weights"),
}


def holds(
    when: str,
    settings: Settings,
    topology: Topology,
    layer: int | None = None,
    fixed: Mapping[str, bool] | None = None,
) -> bool:
    """Whether all words of `when` are true; `layer` is needed for words about layers, `fixed` overrides words."""
    for word in when.split():
        name = word.removeprefix("!")
        if fixed and name in fixed:
            value = fixed[name]
        elif name in LAYER_WORDS:
            assert layer is not None, f"{word} is about a layer"
            value = LAYER_WORDS[name](settings, layer)
        elif name in STORAGE_WORDS:
            value = STORAGE_WORDS[name](settings, topology)
        else:
            value = bool(settings.get(name))
        if value == word.startswith("!"):
            return False
    return True
