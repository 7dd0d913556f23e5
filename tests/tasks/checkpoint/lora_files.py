"""LoRA adapters of toys, put into files by hand: slices and concatenations, without the tables that are tested.

An adapter is {Hugging Face module: (A, B)}. PEFT writes such a thing itself; what a LoRA training of Megatron writes is
cut out here, as `facts/weight-conversion.md` and PEFT's parallel layer say it: B is cut like the rows of the weight, A
like its columns.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mindspeed_llm.tasks.checkpoint.torch_file import read_torch_file

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]
RANK, ALPHA = 4, 6
# Which modules share their A when an adapter is on Megatron's fused layers.
GROUPS = (
    # linear_qkv, that of latent attention included
    ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the adapter's checkpoint is split."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    stages: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1, 2, 3),),)
    """For each pipeline stage, for each of its chunks, its layers."""
    grouped: bool = False


ONE = Split()
TP2 = Split(tp=2)
PP2 = Split(pp=2, stages=(((0, 1),), ((2, 3),)))
TP2_VPP = Split(tp=2, pp=2, stages=(((0,), (2,)), ((1,), (3,))))
EP2 = Split(ep=2)


def random_pairs(shapes: Mapping[str, tuple[int, int]], *, shared: bool, rank: int = RANK, seed: int = 0) -> Pairs:
    """A and B for modules of these weight shapes; modules of a fused layer have one A in common, if `shared`."""
    chance = torch.Generator().manual_seed(seed)
    found: Pairs = {}
    of_group: dict[tuple[str, tuple[str, ...]], torch.Tensor] = {}
    for module, (rows, columns) in shapes.items():
        stem, _, leaf = module.rpartition(".")
        a = torch.randn(rank, columns, generator=chance)
        group = next((group for group in GROUPS if leaf in group), (leaf,))
        if shared:
            a = of_group.setdefault((stem, group), a)
        found[module] = (a, torch.randn(rows, rank, generator=chance) * 0.1)
    return found


def shapes_of(weights: Mapping[str, torch.Tensor], leaves: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The shapes of all matrices in layers whose module has one of these last names."""
    return {
        name.removesuffix(".weight"): tuple(value.shape)
        for name, value in weights.items()
        if ".layers." in name and name.removesuffix(".weight").rpartition(".")[2] in leaves
    }


def save_peft(folder: Path, pairs: Pairs, *, alpha: float = ALPHA, **changes: Any) -> Path:
    """PEFT's files of an adapter."""
    folder.mkdir(parents=True)
    rank = next(iter(pairs.values()))[0].shape[0]
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.clone()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.clone()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in pairs}),
        "bias": "none",
        "lora_dropout": 0.0,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


# What a Megatron training writes


def _chunk(value: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    return value.chunk(count, dim)[index].clone()


def _qkv_rows(parts: Sequence[torch.Tensor], config: Mapping[str, Any], tp: int, index: int) -> torch.Tensor:
    """[q..q k v] for each KV group of this rank."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = parts[1].shape[0] // groups
    per_group = heads // groups
    rows = []
    for group in range(index * groups // tp, (index + 1) * groups // tp):
        rows.append(parts[0][group * per_group * width : (group + 1) * per_group * width])
        rows += [part[group * width : (group + 1) * width] for part in parts[1:]]
    return torch.cat(rows)


def _layer(
    pairs: Pairs, config: Mapping[str, Any], split: Split, tp: int, ep: int, *, fused: bool
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(Megatron module, A, B) of one layer on one rank; `pairs` are named relative to the layer."""
    count = split.tp

    def rows(b: torch.Tensor) -> torch.Tensor:
        return _chunk(b, 0, tp, count)

    def columns(a: torch.Tensor) -> torch.Tensor:
        return _chunk(a, 1, tp, count)

    attention = "self_attn."
    latent = attention + "kv_a_proj_with_mqa" in pairs
    if latent:
        first = "q_a_proj" if attention + "q_a_proj" in pairs else "q_proj"
        down = [pairs[attention + name] for name in (first, "kv_a_proj_with_mqa")]
        if fused:
            yield "self_attention.linear_qkv", down[0][0], torch.cat([b for _, b in down])
        else:
            name = "linear_q_down_proj" if first == "q_a_proj" else "linear_q_proj"
            yield f"self_attention.{name}", *down[0]
            yield "self_attention.linear_kv_down_proj", *down[1]
        for hf, mg in (("q_b_proj", "linear_q_up_proj"), ("kv_b_proj", "linear_kv_up_proj")):
            if attention + hf in pairs:
                a, b = pairs[attention + hf]
                yield f"self_attention.{mg}", a, rows(b)
    elif attention + "q_proj" in pairs:
        qkv = [pairs[f"{attention}{name}_proj"] for name in "qkv"]
        if fused:
            yield "self_attention.linear_qkv", qkv[0][0], _qkv_rows([b for _, b in qkv], config, count, tp)
        else:
            for name, (a, b) in zip("qkv", qkv, strict=True):
                yield f"self_attention.linear_{name}", a, rows(b)
    if attention + "o_proj" in pairs:
        a, b = pairs[attention + "o_proj"]
        yield "self_attention.linear_proj", columns(a), b
    mlps = {"mlp.": "mlp.", "mlp.shared_experts.": "mlp.shared_experts."}
    experts = sorted({int(found[1]) for name in pairs if (found := re.match(r"mlp\.experts\.(\d+)\.", name))})
    if experts and not split.grouped:
        share = len(experts) // split.ep
        for local, expert in enumerate(experts[ep * share : (ep + 1) * share]):
            mlps[f"mlp.experts.{expert}."] = f"mlp.experts.local_experts.{local}."
    for hf, mg in mlps.items():
        if hf + "gate_proj" in pairs:
            gate, up = pairs[hf + "gate_proj"], pairs[hf + "up_proj"]
            if fused:
                yield mg + "linear_fc1", gate[0], torch.cat([rows(gate[1]), rows(up[1])])
            else:
                yield mg + "linear_fc1_gate", gate[0], rows(gate[1])
                yield mg + "linear_fc1_up", up[0], rows(up[1])
        if hf + "down_proj" in pairs:
            a, b = pairs[hf + "down_proj"]
            yield mg + "linear_fc2", columns(a), b


def _grouped(pairs: Pairs, split: Split, tp: int, ep: int) -> dict[str, torch.Tensor]:
    """Adapters of grouped experts: all of a rank in one tensor, [experts, in, out], seen as the weights are."""
    experts = sorted({int(found[1]) for name in pairs if (found := re.match(r"mlp\.experts\.(\d+)\.", name))})
    share = len(experts) // split.ep
    first_a, first_b, second_a, second_b = [], [], [], []
    for expert in experts[ep * share : (ep + 1) * share]:
        gate, up, down = (pairs[f"mlp.experts.{expert}.{name}_proj"] for name in ("gate", "up", "down"))
        first_a.append(gate[0].t())
        first_b.append(torch.cat([_chunk(b, 0, tp, split.tp) for b in (gate[1], up[1])]).t())
        second_a.append(_chunk(down[0], 1, tp, split.tp).t())
        second_b.append(down[1].t())
    hidden, rank = first_a[0].shape
    stacked = [torch.stack(each).contiguous() for each in (first_a, first_b, second_a, second_b)]
    shapes = ((hidden, -1), (rank, -1), (-1, rank), (-1, hidden))
    names = ("weight1_lora_a", "weight1_lora_b", "weight2_lora_a", "weight2_lora_b")
    return {f"mlp.experts.{name}": value.view(shape) for name, value, shape in zip(names, stacked, shapes, strict=True)}


def rank_states(
    pairs: Pairs, config: Mapping[str, Any], split: Split, *, fused: bool
) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """Folder of a rank -> chunk -> key -> tensor."""
    states = {}
    for stage, chunks in enumerate(split.stages):
        for tp in range(split.tp):
            for ep in range(split.ep):
                folder = f"mp_rank_{tp:02d}"
                folder += f"_{stage:03d}" if split.pp > 1 else ""
                folder += f"_{ep:03d}" if split.ep > 1 else ""
                state = {}
                for index, layers in enumerate(chunks):
                    tensors = {}
                    for local, layer in enumerate(layers):
                        prefix = f"model.layers.{layer}."
                        inside = {n.removeprefix(prefix): pair for n, pair in pairs.items() if n.startswith(prefix)}
                        at = f"decoder.layers.{local}."
                        for module, a, b in _layer(inside, config, split, tp, ep, fused=fused):
                            tensors[f"{at}{module}.lora_A.default.weight"] = a.clone()
                            tensors[f"{at}{module}.lora_B.default.weight"] = b.clone()
                        if split.grouped and any(".experts." in name for name in inside):
                            tensors |= {at + key: value for key, value in _grouped(inside, split, tp, ep).items()}
                    state["model" if len(chunks) == 1 else f"model{index}"] = tensors
                states[folder] = state
    return states


def save_megatron(
    folder: Path,
    pairs: Pairs,
    config: Mapping[str, Any],
    split: Split = ONE,
    *,
    fused: bool = True,
    alpha: float | None = ALPHA,
    **arguments: Any,
) -> Path:
    """An adapter's checkpoint, as a training with `--lora-ckpt-filter` leaves it."""
    says = {
        "num_layers": sum(len(layers) for chunks in split.stages for layers in chunks),
        "tensor_model_parallel_size": split.tp,
        "pipeline_model_parallel_size": split.pp,
        "expert_model_parallel_size": split.ep,
        "virtual_pipeline_model_parallel_size": len(split.stages[0]) if len(split.stages[0]) > 1 else None,
        "moe_grouped_gemm": split.grouped,
    }
    says |= {} if alpha is None else {"lora_r": next(iter(pairs.values()))[0].shape[0], "lora_alpha": alpha}
    states = rank_states(pairs, config, split, fused=fused)
    return write(folder, states, says | arguments)


def write(folder: Path, states: Mapping[str, Mapping[str, Any]], arguments: Mapping[str, Any]) -> Path:
    """A checkpoint of iteration 20."""
    for rank, state in states.items():
        path = folder / "iter_0000020" / rank / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(
            {"args": argparse.Namespace(**arguments), "iteration": 20, "checkpoint_version": 3.0} | dict(state), path
        )
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    return folder


def save_unified(
    folder: Path, base: Path, pairs: Pairs, config: Mapping[str, Any], split: Split = ONE, *, fused: bool = True
) -> Path:
    """A whole LoRA checkpoint: the converted `base`, split in the same way, its adapted layers as `base_layer`."""
    states = rank_states(pairs, config, split, fused=fused)
    arguments: dict[str, Any] = {}
    for rank, state in states.items():
        content = read_torch_file(base / "iter_0000001" / rank / "model_optim_rng.pt")
        arguments = vars(content["args"]) | {"lora_r": RANK, "lora_alpha": ALPHA}
        for chunk, tensors in state.items():
            adapted = {re.sub(r"\.lora_[AB]\.default\.weight$", "", key) for key in tensors}
            for key, stored in content[chunk].items():
                module, _, last = key.rpartition(".")
                tensors[f"{module}.base_layer.{last}" if module in adapted else key] = stored.view().clone()
    return write(folder, states, arguments)


def merged(
    weights: Mapping[str, torch.Tensor], pairs: Pairs, *, scale: float = ALPHA / RANK
) -> dict[str, torch.Tensor]:
    """The weights with the adapter merged, in float64 and rounded once."""
    found = dict(weights)
    for module, (a, b) in pairs.items():
        weight = weights[f"{module}.weight"]
        found[f"{module}.weight"] = (weight.double() + scale * (b.double() @ a.double())).to(weight.dtype)
    return found
