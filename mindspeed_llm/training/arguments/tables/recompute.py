"""Recomputation of activations in the backward pass."""

from mindspeed_llm.flag import Group, positive, several, switch, value

_CONFIG = "tasks.models.config"

RECOMPUTE = Group(
    title="Recomputation",
    flags=(
        value(
            "--recompute-granularity",
            str,
            None,
            "compute activations again in the backward pass: of whole layers, or of --recompute-modules.",
            _CONFIG,
            choices=("full", "selective"),
        ),
        value(
            "--recompute-method",
            str,
            None,
            "full: in units of --recompute-num-layers each, or only the first so many layers of a stage.",
            _CONFIG,
            choices=("uniform", "block"),
        ),
        value("--recompute-num-layers", positive, None, "see --recompute-method.", _CONFIG),
        several(
            "--recompute-modules",
            str,
            None,
            "selective: what is computed again: core_attn (the default), moe_act, layernorm, mlp, moe, shared_experts.",
            _CONFIG,
            metavar="MODULE",
        ),
        switch(
            "--distribute-saved-activations",
            "full: spread the kept activations over the TP ranks.",
            _CONFIG,
        ),
    ),
)
