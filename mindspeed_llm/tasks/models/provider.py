"""The one place where models of the Megatron backend are made, for every entry point."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mindspeed_llm.core.config import LlmConfig
from mindspeed_llm.core.gpt_model import LlmGptModel
from mindspeed_llm.core.noop_layer import specs_at
from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.models.layer_specs import decoder_layer, norm_of

LayerSpec = Callable[..., ModuleSpec]
"""(config, moe=whether the layer has experts) -> the layer."""


def build_model(
    args: Namespace,
    config: LlmConfig,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> LlmGptModel:
    """The part of a model that one pipeline stage (one virtual stage of it) holds.

    Args:
        args: arguments of the run, validated.
        config: `transformer_config(args)`.
        pre_process: this part has the embedding.
        post_process: this part has the output layer.
        vp_stage: number of the virtual stage; None without them.
    """
    return LlmGptModel(
        config,
        block_of(config, _layer_spec(args), vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
    )


def block_of(config: LlmConfig, layer: LayerSpec, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one (virtual) stage, each dense or with experts, and the final norm."""
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=specs_at(
            range(first, first + count),
            config.noop_layers,
            lambda position: layer(config, moe=_has_experts(config, position)),
        ),
        layer_norm=norm_of(config),
    )


def _has_experts(config: LlmConfig, position: int) -> bool:
    if config.num_moe_experts is None:
        return False
    pattern = config.moe_layer_freq
    return bool(pattern[position]) if isinstance(pattern, list) else position % pattern == 0


def _layer_spec(args: Namespace) -> LayerSpec:
    """What `--spec MODULE NAME` names: a function, or a finished `ModuleSpec` for all layers.

    Raises:
        UserError: there is no such module, or no such name in it.
    """
    if not args.spec:
        return decoder_layer
    module, name = args.spec
    try:
        spec = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"--spec {module} {name}: {error}; expected a module and the name of a layer spec in it"
        ) from None
    return spec if not isinstance(spec, ModuleSpec) else lambda config, moe: spec
