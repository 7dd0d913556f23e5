"""Rows: megatron-core's transformer block in pipeline stages, laid out by `core.layer_layout`.

Layers are megatron-core's own local ones. Each layer's weights are drawn from its number in the model, so that they are
the same wherever it stands.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
from argparse import Namespace
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_llm.core import layer_layout
from mindspeed_llm.platform import cuda_names

HIDDEN, SEQUENCE, BATCH = 24, 5, 3
_LAYER = re.compile(r"layers\.(\d+)\.")


@contextlib.contextmanager
def parallel(args: Namespace) -> Iterator[None]:
    """megatron-core's parallel state for `args`, gone afterwards."""
    cuda_names.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
    )
    random.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        random.initialize_rng_tracker(force_reset=True)
        parallel_state.destroy_model_parallel()
        cuda_names.uninstall()


def build(args: Namespace, recompute: tuple[str, int] | None = None) -> list[nn.Module]:
    """The blocks of this rank's stage, one per virtual stage, filled."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mindspeed_llm.core.noop_layer import specs_at

    method, count = recompute or (None, None)
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=3,
        ffn_hidden_size=40,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_zero_centered_gamma=False,
        bias_dropout_fusion=False,
        recompute_granularity=None if recompute is None else "full",
        recompute_method=method,
        recompute_num_layers=count,
        **layer_layout.config_fields(args),
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    parts = args.virtual_pipeline_model_parallel_size
    layer = get_gpt_layer_local_spec()
    blocks = []
    for part, positions in enumerate(layer_layout.layer_positions(args)[stage]):
        vp_stage = None if parts is None else part
        block = TransformerBlock(
            config,
            TransformerBlockSubmodules(
                layer_specs=specs_at(positions, layer_layout.noop_layers(args), lambda _: layer),
                layer_norm=WrappedTorchNorm,
            ),
            pre_process=stage == 0 and part == 0,
            post_process=stage == args.pipeline_model_parallel_size - 1 and part == (parts or 1) - 1,
            vp_stage=vp_stage,
        )
        fill(block, positions, layer_layout.layers_at(args))
        blocks.append(block)
    return blocks


def fill(block: nn.Module, positions: range, layers: list[int | None]) -> None:
    """Set each parameter to numbers drawn from its name in the whole model."""
    for name, parameter in block.named_parameters():
        key = whole_name(name, positions, layers)
        generator = torch.Generator().manual_seed(sum(map(ord, key)) + 1009 * len(key))
        with torch.no_grad():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm" in key and "weight" in key)
            )


def whole_name(name: str, positions: range, layers: list[int | None]) -> str:
    """The name of a block's parameter in the whole model, where layers are counted without noop layers."""
    found = _LAYER.search(name)
    if found is None:
        return name
    return name.replace(found[0], f"layers.{layers[positions[int(found[1])]]}.")


def run_blocks(args: Namespace, recompute: tuple[str, int] | None) -> dict[str, Any]:
    """Forward and backward of one batch through all chunks in their order, activations handed from rank to rank."""
    with parallel(args):
        blocks = build(args, recompute)
        stages, rank = args.pipeline_model_parallel_size, dist.get_rank()
        parts = len(blocks)
        shape = (SEQUENCE, BATCH, HIDDEN)
        first = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
        mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        for number in range(parts * stages):
            if number % stages != rank:
                continue
            if number == 0:
                received = first
            else:
                received = torch.empty(shape)
                dist.recv(received, src=(number - 1) % stages)
                received.requires_grad_()
            block = blocks[number // stages]
            block.set_input_tensor(received)
            outputs.append(block(received, mask))
            assert outputs[-1] is not received or block.pre_process, "the schedule frees outputs, never inputs"
            inputs.append(received)
            if number + 1 < parts * stages:
                dist.send(outputs[-1].detach().contiguous(), dst=(number + 1) % stages)
        for number in reversed(range(parts * stages)):
            if number % stages != rank:
                continue
            part = number // stages
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(4))
            if number + 1 < parts * stages:
                dist.recv(gradient, src=(number + 1) % stages)
            outputs[part].backward(gradient)
            if number:
                assert inputs[part].grad is not None
                dist.send(inputs[part].grad, dst=(number - 1) % stages)
        return {
            "output": outputs[-1].detach(),
            "input_gradient": first.grad,
            "gradients": _by_whole_name(args, blocks, "grad"),
        }


def _by_whole_name(args: Namespace, blocks: list[nn.Module], attribute: str) -> dict[str, Tensor]:
    stage = dist.get_rank() if args.pipeline_model_parallel_size > 1 else 0
    layers = layer_layout.layers_at(args)
    return {
        whole_name(name, positions, layers): getattr(parameter, attribute).detach().clone()
        for block, positions in zip(blocks, layer_layout.layer_positions(args)[stage], strict=True)
        for name, parameter in block.named_parameters()
    }


def keys(args: Namespace) -> list[dict[str, Any]]:
    """For each chunk of this rank the local indices of layers that its state dict names."""
    with parallel(args):
        return [
            {"layers": sorted({int(found[1]) for key in block.state_dict() if (found := _LAYER.search(key))})}
            for block in build(args)
        ]


def noop_facts(args: Namespace) -> dict[str, Any]:
    """What a noop layer of this rank has, and what it returns."""
    with parallel(args):
        from mindspeed_llm.core.noop_layer import NoopLayer

        [block] = build(args)
        [layer] = [layer for layer in block.layers if isinstance(layer, NoopLayer)]
        given = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
        returned, context = layer(hidden_states=given, attention_mask=None, rotary_pos_emb=None)
        assert context is None
        return {
            "parameters": len(list(layer.parameters())),
            "state": len(layer.state_dict()),
            "same_object": returned is given,
            "layer_number": layer.layer_number,
        }


def _sharded(args: Namespace, blocks: list[nn.Module]) -> dict[str, Any]:
    from megatron.core import parallel_state

    from mindspeed_llm.core.noop_layer import without_gaps

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": group}
    state: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        found = block.sharded_state_dict(prefix="decoder.", metadata=metadata)
        state |= {f"{number}/{key}": value for key, value in found.items()}
    return without_gaps(state, layer_layout.noop_layers(args))


def save(args: Namespace, folder: str) -> dict[str, Tensor]:
    """Save the blocks with megatron-core's own writer; the parameters by their name in the whole model."""
    with parallel(args):
        from megatron.core import dist_checkpointing

        blocks = build(args)
        # megatron-core writes from child processes, which the pool's ranks, daemons, may not have.
        with mock.patch.dict(multiprocessing.current_process()._config, {"daemon": False}):  # type: ignore[attr-defined]
            dist_checkpointing.save(_sharded(args, blocks), folder)
        return _by_whole_name(args, blocks, "data")


def load(args: Namespace, folder: str) -> dict[str, Tensor]:
    """Load what `save` wrote into other blocks, whose weights are wiped first."""
    with parallel(args):
        from megatron.core import dist_checkpointing

        blocks = build(args)
        for block in blocks:
            for parameter in block.parameters():
                parameter.data.zero_()
        loaded = dist_checkpointing.load(_sharded(args, blocks), folder)
        for number, block in enumerate(blocks):
            state = {key.split("/decoder.", 1)[1]: v for key, v in loaded.items() if key.startswith(f"{number}/")}
            block.load_state_dict(state, strict=False)
        return _by_whole_name(args, blocks, "data")
