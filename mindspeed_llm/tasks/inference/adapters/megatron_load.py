"""From the arguments of the Megatron backend to a model that generates."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

import torch
from torch import nn

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.adapters.megatron import MegatronBackend
from mindspeed_llm.tasks.inference.adapters.megatron_arguments import for_inference
from mindspeed_llm.tasks.inference.adapters.megatron_ranks import find_copy

if TYPE_CHECKING:
    from mindspeed_llm.core.gpt_model import LlmGptModel


def load_megatron(args: Namespace) -> MegatronBackend:
    """The model that arguments describe, with the weights of `args.load`, on the ranks of this job (a collective).

    Makes this process a rank of the job; `MegatronBackend.close` undoes it.

    Args:
        args: of the project's own parser, with the sizes of the model, see `megatron_arguments`.

    Raises:
        UserError: flags that do not fit together, or weights that do not belong to the model.
        CheckpointError: a checkpoint is damaged, or asks for something to be executed.
    """
    from mindspeed_llm.features_manager.features import FEATURES
    from mindspeed_llm.features_manager.manager import FeaturesManager
    from mindspeed_llm.platform import distributed
    from mindspeed_llm.training.initialize import initialize, shutdown

    args = for_inference(args, distributed.world_size())
    if args.load is None:
        raise UserError("--load is missing; expected a folder of checkpoints, or a Hugging Face model directory")
    features = FeaturesManager(FEATURES)

    def undo() -> None:
        features.undo()
        shutdown()

    initialize(args)
    try:
        features.apply(args)
        with torch.no_grad():
            model = _filled_model(args)
        copy = find_copy()
    except BaseException:
        undo()
        raise
    return MegatronBackend(model, args, copy, on_close=undo)


def _filled_model(args: Namespace) -> LlmGptModel:
    """This rank's stage with its weights, in the dtype that it computes in (a collective)."""
    from megatron.core.transformer.module import Float16Module

    from mindspeed_llm.core.lora.settings import lora_settings
    from mindspeed_llm.tasks.inference.adapters.megatron_weights import fill
    from mindspeed_llm.tasks.models.config import transformer_config
    from mindspeed_llm.training.setup import build_chunks, draw_nothing

    config = transformer_config(args)
    draw_nothing(config)
    [model] = build_chunks(args, config)
    _check_attention(model)
    fill(model, args, lora_settings(args))
    return Float16Module(config, model).module if args.bf16 or args.fp16 else model


def _check_attention(model: nn.Module) -> None:
    from megatron.core.transformer.attention import Attention

    from mindspeed_llm.core.key_value_cache import attention_layers

    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if len(attention_layers(model)) != len(layers):
        raise UserError(
            f"--spec: of the {len(layers)} attention layers some do not keep keys and values for generation; expected "
            "layers with mindspeed_llm.core.attention.CoreAttention"
        )
