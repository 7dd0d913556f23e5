"""The parameters of each rank, counted exactly with the mapping tables of `tasks.checkpoint`; no model is built.

The tables of families say which tensors a Hugging Face model becomes. Flags can describe models of no family, so that
here stands one table of everything that they can ask for, made of the families' own parts. It needs torch.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mindspeed_llm.core.layer_layout import layers_at
from mindspeed_llm.tasks.checkpoint.adapter import adapter_model
from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    ATTENTION_BIASES,
    DENSE_MLP,
    FIRST,
    LAST,
    MLP_BIASES,
    NORMS,
    QK_NORM,
    experts,
    gated_mlp,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.layout import Chunk, Rank, Topology
from mindspeed_llm.tasks.checkpoint.lora import places
from mindspeed_llm.tasks.checkpoint.model import Model, bind
from mindspeed_llm.tasks.checkpoint.rules import COLUMNS, ROWS, WHOLE
from mindspeed_llm.tasks.checkpoint.tables import Entry, entry, hf


@dataclass(frozen=True, kw_only=True)
class Count:
    """Parameters: those of experts, whose copies other ranks hold than those of the rest, and the rest."""

    shared: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.shared + self.experts


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What each rank of a pipeline stage holds; ranks of one stage hold equally much."""

    index: int
    chunks: tuple[Chunk, ...]
    """One for each virtual stage; one without them."""
    count: Count
    trained: Count
    """Of these, what has gradients: all, or the adapters."""


def _when(entries: Iterable[Entry], words: str) -> tuple[Entry, ...]:
    return tuple(replace(item, when=f"{item.when} {words}".strip()) for item in entries)


def _plain_mlp() -> tuple[Entry, ...]:
    """An MLP without gate."""
    return (
        entry("mlp.linear_fc1.weight", hf("mlp.fc1.weight", "ffn hidden"), rule=ROWS, when="dense !swiglu"),
        entry("mlp.linear_fc2.weight", hf("mlp.fc2.weight", "hidden ffn"), rule=COLUMNS, when="dense !swiglu"),
        entry("mlp.linear_fc1.bias", hf("mlp.fc1.bias", "ffn"), rule=ROWS, when="dense !swiglu add_mlp_bias"),
        entry("mlp.linear_fc2.bias", hf("mlp.fc2.bias", "hidden"), rule=WHOLE, when="dense !swiglu add_mlp_bias"),
    )


def _plain_experts() -> tuple[Entry, ...]:
    """Experts without gate; how they are stored does not change their number."""
    prefix, key = "mlp.experts.{expert}.", "mlp.experts.local_experts.{local}."
    return (
        entry(f"{key}linear_fc1.weight", hf(f"{prefix}fc1.weight", "expert_ffn hidden"), rule=ROWS, when="moe !swiglu"),
        entry(
            f"{key}linear_fc2.weight", hf(f"{prefix}fc2.weight", "hidden expert_ffn"), rule=COLUMNS, when="moe !swiglu"
        ),
    )


def _plain_shared_expert() -> tuple[Entry, ...]:
    prefix, when = "mlp.shared_experts.", "moe moe_shared_expert_intermediate_size !swiglu"
    return (
        entry(f"{prefix}linear_fc1.weight", hf(f"{prefix}fc1.weight", "shared_ffn hidden"), rule=ROWS, when=when),
        entry(f"{prefix}linear_fc2.weight", hf(f"{prefix}fc2.weight", "hidden shared_ffn"), rule=COLUMNS, when=when),
    )


_SHARED = "mlp.shared_experts."
STRUCTURE = replace(
    LLAMA,
    dimensions={**LLAMA.dimensions, "positions": lambda s: s["max_position_embeddings"]},
    first=(
        *FIRST,
        entry(
            "embedding.position_embeddings.weight",
            hf("model.embed_positions.weight", "positions hidden"),
            rule=WHOLE,
            when="learned_positions",
        ),
    ),
    layer=(
        *NORMS,
        *(
            entry(f"{norm}.bias", hf(f"{norm}.bias", "hidden"), rule=WHOLE, when="norm_bias")
            for norm in ("input_layernorm", "pre_mlp_layernorm")
        ),
        *ATTENTION,
        *ATTENTION_BIASES,
        *_when(QK_NORM, "qk_layernorm"),
        *(
            entry(
                f"self_attention.{norm}.bias",
                hf(f"self_attn.{norm}.bias", "head_dim"),
                rule=WHOLE,
                when="qk_layernorm norm_bias",
            )
            for norm in ("q_layernorm", "k_layernorm")
        ),
        *_when((*DENSE_MLP, *MLP_BIASES), "swiglu"),
        *_plain_mlp(),
        *router(),
        *_when(experts(), "swiglu"),
        *_plain_experts(),
        *gated_mlp(_SHARED, _SHARED, "shared_ffn", when="moe moe_shared_expert_intermediate_size swiglu"),
        *_plain_shared_expert(),
        entry(
            f"{_SHARED}gate_weight", hf(f"{_SHARED}gate.weight", "1 hidden"), rule=WHOLE, when="moe shared_expert_gate"
        ),
    ),
    last=(
        *LAST,
        entry("decoder.final_layernorm.bias", hf("model.norm.bias", "hidden"), rule=WHOLE, when="norm_bias"),
    ),
)
"""Everything that flags can ask for, as a family."""


def model_of(args: Namespace) -> Model:
    """The model that validated arguments describe."""
    layers = layers_at(args)
    settings = {
        name: getattr(args, name)
        for name in (
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "vocab_size",
            "max_position_embeddings",
            "untie_embeddings_and_output_weights",
            "qk_layernorm",
            "swiglu",
            "num_experts",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "shared_expert_gate",
        )
    }
    settings |= {
        "num_layers": sum(layer is not None for layer in layers),
        "add_qkv_bias": args.add_qkv_bias or args.add_bias_linear,
        "add_dense_bias": args.add_bias_linear,
        "add_mlp_bias": args.add_bias_linear,
        "norm_bias": args.normalization == "LayerNorm",
        "learned_positions": args.position_embedding_type == "learned_absolute",
    }
    if args.num_experts:
        settings["moe_layer_freq"] = [
            bit for bit, layer in zip(args.moe_layer_pattern, layers, strict=True) if layer is not None
        ]
    topology = Topology(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
        layers_per_virtual_stage=args.num_layers_per_virtual_pipeline_stage,
        num_layer_list=args.num_layer_list,
        noop_layers=tuple(args.noop_layers or ()),
        moe_grouped_gemm=args.moe_grouped_gemm,
        padded_vocab_size=args.padded_vocab_size,
    )
    return bind(STRUCTURE, settings, topology)


def adapters_of(model: Model, args: Namespace) -> Model | None:
    """The adapters that are trained on a model; None where all of it is."""
    if not args.lora_target_modules:
        return None
    chosen = [place for place in places(model.family) if place.target in args.lora_target_modules]
    return adapter_model(model.family, model.settings, args.lora_r, chosen, model.topology)


def stages_of(model: Model, adapters: Model | None = None) -> list[Stage]:
    """What the ranks of each pipeline stage hold, adapters included where there are any."""
    stages = []
    for index in range(model.topology.pp):
        count = trained = _count(model, Rank(tp=0, pp=index, ep=0))
        if adapters is not None:
            trained = _count(adapters, Rank(tp=0, pp=index, ep=0))
            count = Count(shared=count.shared + trained.shared, experts=count.experts + trained.experts)
        chunks = tuple(chunk for chunk in model.chunks if chunk.stage == index)
        stages.append(Stage(index=index, chunks=chunks, count=count, trained=trained))
    return stages


def whole_model(model: Model) -> int:
    """Parameters of the model on one rank, without padding of the vocabulary, and a tied output layer not counted."""
    alone = bind(model.family, model.settings, Topology())
    return _count(alone, Rank(tp=0, pp=0, ep=0)).total


def active_per_token(model: Model, topk: int) -> int:
    """Of these, the parameters that one token meets: of the experts of a layer only those that it goes to."""
    alone = bind(model.family, model.settings, Topology())
    count = _count(alone, Rank(tp=0, pp=0, ep=0))
    num_experts = model.settings["num_experts"]
    return count.shared + (count.experts * topk // num_experts if num_experts else 0)


def _count(model: Model, rank: Rank) -> Count:
    sizes = {True: 0, False: 0}
    for tensor in model.rank_tensors(rank):
        sizes[tensor.is_expert] += math.prod(tensor.shape)
    return Count(shared=sizes[False], experts=sizes[True])
