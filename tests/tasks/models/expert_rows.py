"""Rows that run on the rank pool: routers of the Megatron backend against a directory and plain arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.megatron_args import megatron_args
from tests.tasks.models.families import labels_of
from tests.tasks.models.sessions import build, loaded, row, run_schedule, session


@row
def routing(*, folder: str, **values: Any) -> list[Any]:
    """The weights [tokens, experts] that each router of the model gives, for the samples in order."""
    from megatron.core.transformer.moe.router import TopKRouter

    args = megatron_args(Path(folder), world_size=dist.get_world_size(), **values)
    with session(args):
        chunks = loaded(args, Path(folder))
        found: dict[str, list[Tensor]] = {}
        for chunk in chunks:
            chunk.eval()
            for name, module in chunk.named_modules():
                if isinstance(module, TopKRouter):
                    kept = found.setdefault(name, [])
                    module.register_forward_hook(
                        lambda module, inputs, output, kept=kept: kept.append((output[0] * output[1]).detach())
                    )
        run_schedule(chunks, args, torch.load(Path(folder) / "reference.pt")["ids"])
        return [torch.cat(kept).numpy() for kept in found.values()]


@row
def sigmoid_routing(*, folder: str, logits: Any, bias: Any, **values: Any) -> Any:
    """The weights [tokens, experts] that the first layer's router gives for these logits and this bias."""
    args = megatron_args(Path(folder), **values)
    with session(args):
        [chunk] = build(args)
        router = chunk.decoder.layers[0].mlp.router
        router.expert_bias.copy_(torch.from_numpy(bias))
        probabilities, chosen = router.eval().routing(torch.from_numpy(logits)[:, None])
        return (probabilities * chosen).detach().numpy()


@row
def updated_bias(*, folder: str, start: float = 0.0, **values: Any) -> list[tuple[int, list[float], list[float], str]]:
    """After one step of training with a bias that was `start`: for each layer of this rank its number, the tokens of
    each expert in the step over all ranks, the bias of the router, and its dtype.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.transformer.module import Float16Module

    path = Path(folder)
    args = megatron_args(path, world_size=dist.get_world_size(), **values)
    with session(args):
        chunks = build(args)
        config = chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                layer.mlp.router.expert_bias.fill_(start)
        inner = [Float16Module(config, chunk) for chunk in chunks] if args.bf16 else chunks
        wrapped = [
            DistributedDataParallel(config=config, ddp_config=DistributedDataParallelConfig(), module=chunk)
            for chunk in inner
        ]
        loads: dict[int, Tensor] = {}
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
        for layer in layers:
            layer.mlp.router.register_forward_hook(
                lambda module, inputs, output, number=layer.layer_number: loads.update(
                    {number: loads.get(number, 0) + output[1].sum(0)}
                )
            )
        ids = torch.load(path / "reference.pt")["ids"]
        size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        run_schedule(wrapped, args, ids[rank::size], labels=labels_of(ids)[rank::size])
        group = parallel_state.get_tensor_and_data_parallel_group()
        found = []
        for layer in layers:
            load = loads[layer.layer_number].clone()
            dist.all_reduce(load, group=group)
            bias = layer.mlp.router.expert_bias
            found.append((layer.layer_number, load.tolist(), bias.tolist(), str(bias.dtype)))
        return found


def gating(*, router_dtype: str | None) -> dict[str, float]:
    """The router's linear layer against torch's, values and gradients: the greatest differences."""
    from mindspeed_llm.core.moe.router_gating import router_gating_linear

    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        wide = {None: dtype, "fp32": torch.float32, "fp64": torch.float64}[router_dtype]
        generator = torch.Generator().manual_seed(1)
        tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 3, 8), (6, 8), (6,))]
        for with_bias in (False, True):
            outcomes = []
            for function in (router_gating_linear, _plain_gating):
                tokens, weight, bias = (tensor.clone().requires_grad_() for tensor in tensors)
                used = [tokens, weight, *([bias] if with_bias else [])]
                output = function(tokens, weight, bias if with_bias else None, wide)
                assert output.dtype == wide
                gradients = torch.autograd.grad(output.cos().sum(), used)
                outcomes.append((output, *gradients))
            for mine, right in zip(*outcomes, strict=True):
                name = f"{dtype} {with_bias} {tuple(right.shape)}"
                errors[name] = float((mine - right).abs().max())
    return errors


def _plain_gating(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return nn.functional.linear(tokens.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
