"""Rows: linear layers in chunks beside megatron-core's own, with the same weights and inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_llm.platform import cuda_names
from tests.core.overlapped_mutants import MUTANTS

BATCH, INPUTS, OUTPUTS = 2, 12, 20
KINDS = ("column", "row")


@contextlib.contextmanager
def tensor_parallel(ranks: int) -> Iterator[Any]:
    """megatron-core's state for a run of tensor parallel ranks; gives its group of them."""
    cuda_names.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    random.model_parallel_cuda_manual_seed(1)
    try:
        yield parallel_state.get_tensor_model_parallel_group()
    finally:
        random.initialize_rng_tracker(force_reset=True)
        parallel_state.destroy_model_parallel()
        cuda_names.uninstall()


def layer_of(kind: str, *, chunks: int, sequence_parallel: bool, adds_bias: bool) -> torch.nn.Module:
    """A layer [12 -> 20], with the same weights for any number of chunks."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from mindspeed_llm.core.config import LlmConfig
    from mindspeed_llm.core.overlapped_linears import OverlappedColumnLinear, OverlappedRowLinear

    config = LlmConfig(
        num_layers=1,
        hidden_size=INPUTS,
        num_attention_heads=4,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=sequence_parallel,
        overlapped_linear_chunks=chunks,
        gradient_accumulation_fusion=False,
    )
    own = (OverlappedColumnLinear, OverlappedRowLinear) if chunks else (ColumnParallelLinear, RowParallelLinear)
    options: dict[str, Any] = {"gather_output": False} if kind == "column" else {"input_is_parallel": True}
    layer = own[KINDS.index(kind)](
        INPUTS,
        OUTPUTS,
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=True,
        skip_bias_add=not adds_bias,
        **options,
    )
    generator = torch.Generator().manual_seed(11 + dist.get_rank())
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
        # The bias of a row is the same on all ranks.
        shared = generator if kind == "column" else torch.Generator().manual_seed(5)
        layer.bias.copy_(torch.randn(layer.bias.shape, generator=shared))
    return layer


def _passes(layer: torch.nn.Module, kind: str, rows: int, sequence_parallel: bool) -> dict[str, Tensor]:
    """One forward and backward pass: what goes in is parted as the kind of layer and the sequence are."""
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    split = sequence_parallel if kind == "column" else True
    generator = torch.Generator().manual_seed(3 + (rank if split else 0))
    length = rows if sequence_parallel and kind == "column" else rows * ranks
    width = INPUTS if kind == "column" else INPUTS // ranks
    given = torch.randn(length, BATCH, width, generator=generator).requires_grad_()
    output, bias = layer(given)
    whole = output if bias is None else output + bias
    # Ranks with the same output have the same gradient of it.
    differs = rank if kind == "column" or sequence_parallel else 0
    gradient = torch.randn(whole.shape, generator=torch.Generator().manual_seed(17 + differs))
    whole.backward(gradient)
    assert given.grad is not None
    return {
        "output": whole.detach(),
        "bias left": torch.tensor(float(bias is not None)),
        "input": given.grad,
        "weight": layer.weight.grad,
        "bias": layer.bias.grad,
    }


def differences(*, rows: list[int], chunks: list[int], mutant: str | None = None) -> dict[str, float]:
    """For each case the largest difference to megatron-core's layer, of outputs and gradients, relative to the largest
    number.

    Args:
        rows: of each rank's part of a sequence.
        chunks: numbers of chunks.
        mutant: a fault to put in.
    """
    found: dict[str, float] = {}
    with tensor_parallel(dist.get_world_size()):
        for kind in KINDS:
            for sequence_parallel in (False, True):
                for adds_bias in (False, True):
                    common = {"sequence_parallel": sequence_parallel, "adds_bias": adds_bias}
                    for length in rows:
                        ordinary = _passes(layer_of(kind, chunks=0, **common), kind, length, sequence_parallel)
                        for count in chunks:
                            layer = layer_of(kind, chunks=count, **common)
                            with MUTANTS[mutant]():
                                mine = _passes(layer, kind, length, sequence_parallel)
                            name = f"{kind} sp={sequence_parallel} bias={adds_bias} rows={length} chunks={count}"
                            found[name] = max(_distance(mine[key], ordinary[key]) for key in ordinary)
    return found


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def keys_and_places() -> dict[str, list[Any]]:
    """The names of a layer's tensors, and where they lie in a checkpoint of the whole model."""
    with tensor_parallel(dist.get_world_size()):
        from megatron.core import parallel_state

        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        found = {}
        for kind in KINDS:
            for chunks in (0, 4):
                layer = layer_of(kind, chunks=chunks, sequence_parallel=True, adds_bias=True)
                places = layer.sharded_state_dict("layer.", metadata=metadata)
                found[f"{kind} {chunks}"] = [
                    sorted(layer.state_dict()),
                    sorted(
                        (name, getattr(place, "global_shape", None), getattr(place, "global_offset", None))
                        for name, place in places.items()
                    ),
                ]
        return found


def events(*, kind: str, sequence_parallel: bool, rows: int, chunks: int) -> dict[str, list[str]]:
    """In which order products begin, and collectives are started and waited for, in each direction."""
    log: list[str] = []
    numbers = {"gather": 0, "sum": 0, "scatter": 0}

    def spy(module: Any, name: str, word: str) -> Any:
        original = getattr(module, name)

        def start(*arguments: Any, **options: Any) -> Any:
            if not options.get("async_op"):
                return original(*arguments, **options)
            mark = f"{word} {numbers[word]}"
            numbers[word] += 1
            log.append(f"start {mark}")
            work = original(*arguments, **options)
            return mock.Mock(wait=lambda: (log.append(f"end {mark}"), work.wait())[1])

        return mock.patch.object(module, name, start)

    matmul = torch.matmul

    def multiply(*arguments: Any, **options: Any) -> Tensor:
        log.append("multiply")
        return matmul(*arguments, **options)

    with tensor_parallel(dist.get_world_size()), contextlib.ExitStack() as stack:
        layer = layer_of(kind, chunks=chunks, sequence_parallel=sequence_parallel, adds_bias=False)
        split = sequence_parallel and kind == "column"
        width = INPUTS if kind == "column" else INPUTS // dist.get_world_size()
        given = torch.randn(rows if split else rows * dist.get_world_size(), BATCH, width).requires_grad_()
        stack.enter_context(spy(dist, "all_gather_into_tensor", "gather"))
        stack.enter_context(spy(dist, "all_reduce", "sum"))
        stack.enter_context(spy(dist, "reduce_scatter_tensor", "scatter"))
        stack.enter_context(mock.patch.object(torch, "matmul", multiply))
        output, _ = layer(given)
        forward = log.copy()
        log.clear()
        numbers.update(dict.fromkeys(numbers, 0))
        output.sum().backward()
        return {"forward": forward, "backward": log}
