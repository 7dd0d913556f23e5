"""Filling the model of a running job straight from a Hugging Face directory: each rank reads only its own slices."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import nn

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.layout import Rank, Topology
from mindspeed_llm.tasks.checkpoint.load import Loaded, load
from mindspeed_llm.tasks.checkpoint.model import bind
from mindspeed_llm.tasks.checkpoint.plan import rank_targets
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.tasks.checkpoint.slabs import assemble, slabs
from mindspeed_llm.tasks.checkpoint.sources import WithCopies


def topology_of(args: Namespace) -> Topology:
    """The topology of a run, in the words of the mapping tables."""
    virtual = args.virtual_pipeline_model_parallel_size
    stages = args.pipeline_model_parallel_size * (virtual or 1)
    return Topology(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        # However the run says it, as layers or as stages.
        layers_per_virtual_stage=args.num_layers // stages if virtual else None,
        num_layer_list=args.num_layer_list,
        noop_layers=tuple(args.noop_layers or ()),
        moe_grouped_gemm=args.moe_grouped_gemm,
        padded_vocab_size=args.padded_vocab_size,
    )


def load_hf_weights(chunks: Sequence[nn.Module], folder: Path, args: Namespace) -> None:
    """Fill the chunks of this rank from the weights in `folder`, in the dtype of their parameters.

    Args:
        chunks: the models of this rank's pipeline stage, one per virtual stage, without wrappers.

    Raises:
        UserError: the directory is none, holds another model than the arguments describe, or lacks a tensor.
    """
    request = ConversionRequest(
        load_model_type="hf",
        save_model_type="mg",
        load_dir=folder,
        save_dir=folder,
        model_type_hf=args.model_type_hf,
    )
    loaded = load(request)
    _compare(loaded, args, folder)
    topology = topology_of(args)
    model = bind(loaded.family, loaded.settings, replace(topology, mtp_num_layers=0))
    source = WithCopies(loaded.source, model.written_copies)
    rank = Rank(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
    )
    states = {
        f"model{index}" if topology.is_virtual else "model": _parameters(chunk) for index, chunk in enumerate(chunks)
    }
    left = {(chunk, key) for chunk, state in states.items() for key in state}
    with torch.no_grad():
        for tensor, target in rank_targets(model, rank, source):
            parameter = states[tensor.chunk].get(tensor.key)
            if parameter is None or tuple(parameter.shape) != target.shape:
                found = "no such parameter" if parameter is None else f"one of shape {tuple(parameter.shape)}"
                raise UserError(
                    f"{folder}: {tensor.key} of shape {target.shape} has no place in the model, which has {found}; "
                    "check the flags that describe the model, or give --model-from-hf instead of them"
                )
            place = parameter.data.view(target.view)
            for slab in slabs(target):
                values = assemble(target, slab, source)
                place[tuple(slice(*bounds) for bounds in slab)].copy_(values)
            left.discard((tensor.chunk, tensor.key))
    if left:
        _, key = min(left)
        raise UserError(
            f"{folder} has nothing for {key} and {len(left) - 1} more parameters of the model; check the flags that "
            "describe the model, or give --model-from-hf instead of them"
        )


def _parameters(chunk: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and buffers that checkpoints hold, by their keys in a checkpoint."""
    return {name: value for name, value in chunk.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def _compare(loaded: Loaded, args: Namespace, folder: Path) -> None:
    for name in (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "ffn_hidden_size",
        "vocab_size",
    ):
        said = loaded.settings.get(name)
        mine = getattr(args, name)
        if name == "num_layers":
            mine -= len(args.noop_layers or ())
        if said is not None and mine != said:
            raise UserError(
                f"{folder / 'config.json'} says {said} for --{name.replace('_', '-')}, the run has {mine}; "
                "correct the flag, or give --model-from-hf"
            )
