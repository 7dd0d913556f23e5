"""Mixture of experts: which layers have them, how tokens find them and travel to them."""

from mindspeed_llm.flag import (
    Group,
    amount,
    count,
    integer,
    layer_pattern,
    number,
    positive,
    switch,
    value,
)

_CONFIG = "tasks.models.config"

EXPERTS = Group(
    title="Experts",
    flags=(
        value("--num-experts", positive, None, "number of experts of a layer; none by default.", _CONFIG),
        value(
            "--moe-ffn-hidden-size", positive, None, "inner width of an expert; by default --ffn-hidden-size.", _CONFIG
        ),
        value(
            "--moe-layer-freq",
            layer_pattern,
            1,
            "which layers have experts. N: each N-th, the first included (-1: all); a list: 1 for each that has.",
            "core.layer_layout",
        ),
        value(
            "--first-k-dense-replace",
            integer,
            None,
            "so many layers at the start have no experts (-1: none).",
            "core.layer_layout",
        ),
        value(
            "--moe-shared-expert-intermediate-size",
            positive,
            None,
            "inner width of an expert that sees every token; none by default.",
            _CONFIG,
        ),
        value(
            "--n-shared-experts",
            count,
            None,
            "the same, as a number of experts of --moe-ffn-hidden-size.",
            "training.arguments.checks.experts",
        ),
        switch("--shared-expert-gate", "weigh the shared expert by a gate of its own.", _CONFIG),
        switch(
            "--moe-shared-expert-overlap",
            "compute the shared expert while tokens travel (dispatcher alltoall).",
            _CONFIG,
        ),
        switch("--moe-grouped-gemm", "multiply by the weights of all experts of a rank in one call.", _CONFIG),
    ),
)

ROUTER = Group(
    title="Experts: router",
    flags=(
        value("--moe-router-topk", positive, 2, "number of experts that a token goes to.", _CONFIG),
        value(
            "--moe-router-load-balancing-type",
            str,
            "aux_loss",
            "what keeps the load of experts even: a loss over a micro batch, over a sequence, over the micro batches "
            "of a step so far, Sinkhorn's assignment, or nothing.",
            _CONFIG,
            choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
        ),
        value("--moe-aux-loss-coeff", amount, 0.0, "weight of that loss.", _CONFIG),
        value("--moe-z-loss-coeff", amount, None, "weight of the loss on the size of router logits.", _CONFIG),
        value(
            "--moe-router-score-function",
            str,
            "softmax",
            "from logits to scores.",
            _CONFIG,
            choices=("softmax", "sigmoid"),
        ),
        switch("--norm-topk-prob", "weights of the chosen experts sum to one.", _CONFIG),
        value("--moe-router-topk-scaling-factor", number, None, "multiply the weights by this number.", _CONFIG),
        value("--moe-router-num-groups", positive, None, "number of groups that experts stand in.", _CONFIG),
        value("--moe-router-group-topk", positive, None, "number of groups that a token may choose from.", _CONFIG),
        switch("--moe-router-enable-expert-bias", "balance the load by a bias of each expert.", _CONFIG),
        value("--moe-router-bias-update-rate", amount, 1e-3, "step of that bias.", _CONFIG),
        value("--moe-router-dtype", str, None, "dtype of the router.", _CONFIG, choices=("fp32", "fp64")),
    ),
)

DISPATCH = Group(
    title="Experts: dispatch",
    flags=(
        value(
            "--moe-token-dispatcher-type",
            str,
            "allgather",
            "how tokens travel to the ranks of their experts.",
            _CONFIG,
            choices=("allgather", "alltoall"),
        ),
        value(
            "--moe-expert-capacity-factor",
            number,
            None,
            "tokens that an expert takes, in terms of an even share; more are dropped. None are by default.",
            _CONFIG,
        ),
        switch("--moe-pad-expert-input-to-capacity", "pad the input of each expert to its capacity.", _CONFIG),
        value(
            "--moe-token-drop-policy",
            str,
            "probs",
            "which tokens are dropped: those of the lowest weights, or the last.",
            _CONFIG,
            choices=("probs", "position"),
        ),
    ),
)
