"""Sizes of a model that its throughput and its memory follow from."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Parameters and dimensions of a model.

    `active` counts the weights that take part in a matrix product for one token: the input embedding counts only
    where it is also the output head, and of the routed experts those that a token visits. `trainable` counts those
    of the total that get a gradient, `active_frozen` those of the active that get none.
    """

    total: int
    trainable: int
    active: int
    active_frozen: int
    layers: int
    hidden: int
    heads: int
    head_dim: int
    vocabulary: int


def model_size(model: PreTrainedModel) -> ModelSize:
    """Count the parameters of `model` (which may be on meta or sharded: shapes are enough)."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0
    chosen = _first(config, "num_experts_per_tok", "moe_topk", "top_k") or experts
    total, trainable, active, active_frozen = 0, 0, 0.0, 0.0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        trainable += parameter.numel() if parameter.requires_grad else 0
        if parameter is embedding and not tied:
            continue
        routed = experts > 0 and ".experts." in name and "shared" not in name
        visited = parameter.numel() * (chosen / experts if routed else 1.0)
        active += visited
        active_frozen += 0.0 if parameter.requires_grad else visited
    heads = config.num_attention_heads
    return ModelSize(
        total=total,
        trainable=trainable,
        active=round(active),
        active_frozen=round(active_frozen),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=embedding.shape[0],
    )


def _first(config: object, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
