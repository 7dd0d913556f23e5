"""Rows: megatron-core's own layers with the features of recomputation, and what they keep for the backward pass."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from tests.core.layer_rows import parallel
from tests.features_manager.command import arguments

SEQUENCE, BATCH = 6, 2


class Kept:
    """Counts the bytes that autograd keeps: each storage once, parameters left out."""

    def __init__(self, modules: nn.Module) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in modules.parameters()}
        self._storages: list[torch.UntypedStorage] = []

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Watches what is computed inside."""

        def pack(tensor: Tensor) -> Tensor:
            self._storages.append(tensor.untyped_storage())
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def num_bytes(self) -> int:
        """What is still held: a storage that has been emptied holds nothing."""
        held = {s.data_ptr(): s.nbytes() for s in self._storages if s.nbytes() and s.data_ptr() not in self._own}
        return sum(held.values())


def block_facts(flags: str, activation: str, **fields: Any) -> dict[str, Any]:
    """One forward and backward pass through a block of megatron-core's local layers (no pipeline).

    Args:
        flags: of the command line.
        activation: name of the activation function in torch.
        fields: of the configuration, besides what the arguments say.
    """
    args = arguments(flags, world_size=dist.get_world_size())
    with parallel(args):
        manager = FeaturesManager(FEATURES)
        manager.apply(args)
        try:
            return _measure(_block(args, activation_func=getattr(F, activation), **fields))
        finally:
            manager.undo()


def _block(args: Any, *, num_experts: int = 0, shared: bool = False, **fields: Any) -> nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts: dict[str, Any] = {}
    if num_experts:
        experts = {
            "num_moe_experts": num_experts,
            "moe_ffn_hidden_size": args.ffn_hidden_size,
            "moe_shared_expert_intermediate_size": args.ffn_hidden_size if shared else None,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
        }
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        recompute_granularity=args.recompute_granularity,
        recompute_modules=None if args.recompute_modules is None else list(args.recompute_modules),
        **{**experts, **fields},
    )
    torch.manual_seed(7)
    return TransformerBlock(config, get_gpt_layer_local_spec(num_experts=num_experts or None))


def _measure(block: nn.Module) -> dict[str, Any]:
    given = torch.randn(SEQUENCE, BATCH, block.config.hidden_size, generator=torch.Generator().manual_seed(3))
    given.requires_grad_()
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    kept = Kept(block)
    with kept.hooks():
        output = block(given, mask)
    num_bytes = kept.num_bytes()
    output.square().sum().backward()
    assert given.grad is not None
    return {
        "output": output.detach(),
        "kept": num_bytes,
        "gradients": {name: p.grad for name, p in block.named_parameters()} | {"input": given.grad},
    }


def times_computed(flags: str) -> list[int]:
    """For each position of this rank's stage how often its layer's forward pass ran in one forward and backward pass.

    A pipeline of two stages with two virtual parts each; every part gets an input of its own.
    """
    args = arguments(flags, world_size=2)
    with parallel(args):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_block import TransformerBlock
        from megatron.core.transformer.transformer_config import TransformerConfig

        manager = FeaturesManager(FEATURES)
        manager.apply(args)
        counts: Counter[int] = Counter()
        try:
            config = TransformerConfig(
                num_layers=args.num_layers,
                hidden_size=args.hidden_size,
                num_attention_heads=args.num_attention_heads,
                ffn_hidden_size=args.ffn_hidden_size,
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=2,
                pipeline_dtype=torch.float32,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                bias_dropout_fusion=False,
                recompute_granularity=args.recompute_granularity,
                recompute_method=args.recompute_method,
                recompute_num_layers=args.recompute_num_layers,
            )
            spec = get_gpt_layer_local_spec()
            parts = [TransformerBlock(config, spec, post_process=False, vp_stage=stage) for stage in range(2)]
            mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
            for part in parts:
                for layer in part.layers:
                    number = layer.layer_number - 1
                    layer.register_forward_pre_hook(lambda *_, number=number: counts.update([number]))
                part(torch.randn(SEQUENCE, BATCH, args.hidden_size, requires_grad=True), mask).sum().backward()
            assert config.recompute_num_layers == args.recompute_num_layers, "the shared configuration is as it was"
            return [counts[position] for position in sorted(counts)]
        finally:
            manager.undo()


def deterministic_facts(flags: str) -> dict[str, bool]:
    """What `training.initialize` and megatron-core make of the flags."""
    from mindspeed_llm.training.initialize import initialize, shutdown

    args = arguments(flags)
    before = torch.are_deterministic_algorithms_enabled()
    initialize(args)
    try:
        from megatron.core.tensor_parallel import VocabParallelEmbedding

        from mindspeed_llm.tasks.models.config import transformer_config

        config = transformer_config(args)
        embedding = VocabParallelEmbedding(8, 8, init_method=config.init_method, config=config)
        return {
            "torch": torch.are_deterministic_algorithms_enabled(),
            "config": config.deterministic_mode,
            "embedding": embedding.deterministic_mode,
        }
    finally:
        shutdown()
        torch.use_deterministic_algorithms(before)
