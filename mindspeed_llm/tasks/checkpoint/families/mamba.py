"""Mamba 2: state space layers. Their fused projections are cut by section, so that each rank has its heads and groups.

in_proj    rows [z | x | B | C | dt]      x and z of d_inner, B and C of groups x state, dt one per head
conv1d     rows [x | B | C]
"""

import math
from itertools import pairwise

from mindspeed_llm.tasks.checkpoint.families.blocks import embedding, output, tied_head
from mindspeed_llm.tasks.checkpoint.families.settings import SIZES
from mindspeed_llm.tasks.checkpoint.fields import Field, Only, Settings, without
from mindspeed_llm.tasks.checkpoint.rules import COLUMNS, ROWS, WHOLE, Rule
from mindspeed_llm.tasks.checkpoint.tables import Entry, Family, Hf, Refused, entry, hf

_EMBEDDING = hf("backbone.embeddings.weight", "vocab hidden")


def _sections(name: str, shape: str, *words: str) -> tuple[Hf, ...]:
    """The sections of the rows of a tensor between these words."""
    return tuple(hf(name, shape, {0: pair}) for pair in pairwise(words))


def _mixer(name: str, *sources: Hf, rule: Rule = ROWS, when: str = "") -> Entry:
    return entry(f"mixer.{name}", *sources, rule=rule, when=when)


MAMBA2 = Family(
    ids=("mamba2",),
    architectures=("Mamba2ForCausalLM",),
    model_type="mamba2",
    models="Mamba 2, Codestral Mamba",
    fields=(
        *without(SIZES, "max_position_embeddings"),
        Field(mg="position_embedding_type", default="none"),
        Field(mg="normalization", default="RMSNorm"),
        Field(mg="norm_epsilon", hf=("layer_norm_epsilon",), default=1e-5),
        Field(mg="mamba_state_dim", hf=("state_size",), default=128),
        Field(mg="mamba_num_groups", hf=("n_groups",), default=8),
        Field(mg="mamba_head_dim", hf=("head_dim",), default=64),
        Field(mg="mamba_expand", hf=("expand",), default=2),
        Field(mg="mamba_num_heads", hf=("num_heads",), default=lambda s: _inner(s) // s["mamba_head_dim"]),
        Field(mg="mamba_d_conv", hf=("conv_kernel",), default=4),
        Field(mg="mamba_chunk_size", hf=("chunk_size",), default=256),
        Field(mg="add_bias_linear", hf=("use_bias",), default=False),
        Field(mg="mamba_conv_bias", hf=("use_conv_bias",), default=True),
        Only(hf="hidden_act", holds=lambda value, _: value in ("silu", "swish"), expected="silu"),
        # Megatron's state space layers do not bound the time step.
        Only(
            hf="time_step_limit",
            # transformers 5 writes the infinite number as an object, older versions as JSON's Infinity.
            holds=lambda value, _: value in ([0, math.inf], [0, {"__float__": "Infinity"}]),
            expected="[0.0, Infinity]",
        ),
    ),
    dimensions={
        "inner": lambda s: _inner(s),
        "ssm_heads": lambda s: _inner(s) // s["mamba_head_dim"],
        "state": lambda s: s["mamba_num_groups"] * s["mamba_state_dim"],
        "x_end": lambda s: 2 * _inner(s),
        "b_end": lambda s: 2 * _inner(s) + _state(s),
        "c_end": lambda s: 2 * _inner(s) + 2 * _state(s),
        "projected": lambda s: 2 * _inner(s) + 2 * _state(s) + _inner(s) // s["mamba_head_dim"],
        "conv_b_end": lambda s: _inner(s) + _state(s),
        "conv": lambda s: _inner(s) + 2 * _state(s),
        "conv_kernel": lambda s: s["mamba_d_conv"],
    },
    first=embedding(_EMBEDDING),
    last=(
        entry("decoder.final_norm.weight", hf("backbone.norm_f.weight", "hidden"), rule=WHOLE),
        *output(_EMBEDDING),
    ),
    layer=(
        entry("norm.weight", hf("norm.weight", "hidden"), rule=WHOLE),
        _mixer("A_log", hf("mixer.A_log", "ssm_heads")),
        _mixer("D", hf("mixer.D", "ssm_heads")),
        _mixer("dt_bias", hf("mixer.dt_bias", "ssm_heads")),
        _mixer("norm.weight", hf("mixer.norm.weight", "inner")),
        _mixer(
            "in_proj.weight",
            *_sections(
                "mixer.in_proj.weight", "projected hidden", "0", "inner", "x_end", "b_end", "c_end", "projected"
            ),
        ),
        _mixer(
            "conv1d.weight",
            *_sections("mixer.conv1d.weight", "conv 1 conv_kernel", "0", "inner", "conv_b_end", "conv"),
        ),
        _mixer(
            "conv1d.bias",
            *_sections("mixer.conv1d.bias", "conv", "0", "inner", "conv_b_end", "conv"),
            when="mamba_conv_bias",
        ),
        _mixer("out_proj.weight", hf("mixer.out_proj.weight", "hidden inner"), rule=COLUMNS),
    ),
    copies=tied_head(_EMBEDDING),
    refused=(
        Refused(
            when="te",
            flags="--transformer-impl transformer_engine",
            reason="there is one form of its names only, that of the local implementation; leave the flag out",
        ),
    ),
    layer_prefix="backbone.layers.{layer}.",
)


def _inner(settings: Settings) -> int:
    return settings["mamba_expand"] * settings["hidden_size"]


def _state(settings: Settings) -> int:
    return settings["mamba_num_groups"] * settings["mamba_state_dim"]
