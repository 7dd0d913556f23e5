"""Filling the model of a running job straight from a Hugging Face directory: each rank reads only its own slices."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from mindspeed_llm.core import layer_layout
from mindspeed_llm.errors import UserError
from mindspeed_llm.platform.distributed import is_rank_zero
from mindspeed_llm.tasks.checkpoint.layout import Rank, Topology
from mindspeed_llm.tasks.checkpoint.load import load
from mindspeed_llm.tasks.checkpoint.model import Model, bind
from mindspeed_llm.tasks.checkpoint.plan import rank_targets
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.tasks.checkpoint.slabs import assemble, slabs
from mindspeed_llm.tasks.checkpoint.sources import Source, WithCopies
from mindspeed_llm.tasks.models.hf_arguments import hf_arguments

_logger = logging.getLogger("mindspeed_llm")
_HINT = "check the flags that describe the model, or give --model-from-hf instead of them"
# Arguments that say what the weights are. Where others differ, a run may want to train the model to be another one.
_OF_WEIGHTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "position_embedding_type", "rotary_percent", "swiglu", "qk_layernorm"),
    *("add_qkv_bias", "add_bias_linear", "untie_embeddings_and_output_weights"),
    *("num_experts", "moe_layer_freq", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "shared_expert_gate"),
)
# Arguments that say nothing about what the model computes.
_FREE = ("init_method_std", "moe_aux_loss_coeff", "max_position_embeddings", "group_query_attention")


def topology_of(args: Namespace) -> Topology:
    """The topology of a run, in the words of the mapping tables."""
    return Topology(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        layers_per_virtual_stage=args.num_layers_per_virtual_pipeline_stage,
        num_layer_list=args.num_layer_list,
        noop_layers=layer_layout.noop_layers(args),
        moe_grouped_gemm=args.moe_grouped_gemm,
        padded_vocab_size=args.padded_vocab_size,
    )


def load_hf_weights(chunks: Sequence[nn.Module], folder: Path, args: Namespace) -> None:
    """Fill the chunks of this rank from the weights in `folder`, in the dtype of their parameters.

    Where the arguments of the run differ from config.json in what weights do not tell (the base of rotary positions,
    windows, ...), the arguments hold, and a warning says so.

    Args:
        chunks: the models of this rank's pipeline stage, one per virtual stage, without wrappers.
        folder: a Hugging Face model directory.
        args: the arguments that the chunks were built from.

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
    where = str(folder / "config.json")
    _compare(hf_arguments(loaded.family, loaded.config, where, noop_layers=layer_layout.noop_layers(args)), args, where)
    model = bind(loaded.family, loaded.settings, topology_of(args))
    source = WithCopies(loaded.source, model.written_copies)
    left = fill(
        [parameters(chunk) for chunk in chunks], model, source, misplaced=lambda found: f"{folder}: {found}; {_HINT}"
    )
    if left:
        raise UserError(f"{folder} has nothing for {left[0]} and {len(left) - 1} more parameters of the model; {_HINT}")


def fill(
    chunks: Sequence[Mapping[str, torch.Tensor]], model: Model, source: Source, *, misplaced: Callable[[str], str]
) -> list[str]:
    """Copy this rank's share of `source` into the tensors of its chunks; returns the keys of those that got nothing.

    Args:
        chunks: for each chunk of this rank its tensors, by their keys in a checkpoint.
        model: what is cut where, see `tasks.checkpoint.model.bind`.
        source: the files; only what this rank needs is read.
        misplaced: makes the message of the error below from what was found.

    Raises:
        UserError: a tensor of the files has no place here, or one of another shape.
    """
    rank = Rank(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
    )
    states = {f"model{index}" if model.topology.is_virtual else "model": state for index, state in enumerate(chunks)}
    left = {(chunk, key) for chunk, state in states.items() for key in state}
    with torch.no_grad():
        for tensor, target in rank_targets(model, rank, source):
            parameter = states[tensor.chunk].get(tensor.key)
            if parameter is None or tuple(parameter.shape) != target.shape:
                found = "no such parameter" if parameter is None else f"one of shape {tuple(parameter.shape)}"
                raise UserError(
                    misplaced(f"{tensor.key} of shape {target.shape} has no place in the model, which has {found}")
                )
            place = parameter.data.view(target.view)
            for slab in slabs(target):
                place[tuple(slice(*bounds) for bounds in slab)].copy_(assemble(target, slab, source))
            left.discard((tensor.chunk, tensor.key))
    return [key for _, key in sorted(left)]


def parameters(chunk: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and buffers that checkpoints hold, by their keys in a checkpoint."""
    return {name: value for name, value in chunk.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def _compare(said: Mapping[str, Any], args: Namespace, where: str) -> None:
    """Refuse weights of another model; warn about a run that computes something else with them."""
    mine = vars(args) | {"moe_layer_freq": tuple(layer_layout.moe_pattern(args)) if args.num_experts else None}
    others = []
    for name, value in said.items():
        if mine[name] == value or name in _FREE:
            continue
        flag = f"--{name.replace('_', '-')}"
        if name in _OF_WEIGHTS:
            raise UserError(f"{where} says {value} for {flag}, the run has {mine[name]}; {_HINT}")
        others.append(f"{flag} {mine[name]} (config.json: {value})")
    if others and is_rank_zero():
        _logger.warning("the run goes on from the weights of %s with other settings: %s", where, ", ".join(others))
