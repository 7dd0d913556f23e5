"""The structure of the model: sizes, attention, positions, MLP, norms, initial weights."""

from mindspeed_llm.flag import (
    Group,
    amount,
    count,
    fraction,
    layer_pattern,
    negative,
    number,
    positive,
    several,
    switch,
    value,
)

_CONFIG = "tasks.models.config"
_PROVIDER = "tasks.models.provider"
_STRUCTURE = "training.arguments.checks.structure"

SIZES = Group(
    title="Model: sizes",
    flags=(
        value(
            "--model-from-hf",
            str,
            None,
            "take every structure flag from the config.json of a Hugging Face model directory. Flags given beside it "
            "must agree with it.",
            "training.arguments.model_from_hf",
            metavar="DIR",
        ),
        several(
            "--spec",
            str,
            None,
            "module and name of the layer specification; without it, the one that fits the other flags.",
            _PROVIDER,
            metavar=("MODULE", "NAME"),
            nargs=2,
        ),
        value("--num-layers", positive, None, "number of layers, --noop-layers included.", _CONFIG),
        value("--hidden-size", positive, None, "width of the hidden states.", _CONFIG),
        value(
            "--ffn-hidden-size",
            positive,
            None,
            "inner width of the MLP. Without it 4 x --hidden-size, with --swiglu two thirds of that, rounded down to a "
            "multiple of 64.",
            _CONFIG,
        ),
        value(
            "--vocab-size",
            positive,
            None,
            "number of tokens before padding; by default the tokenizer's.",
            f"{_STRUCTURE} {_CONFIG}",
        ),
        value(
            "--padded-vocab-size",
            positive,
            None,
            "rows of the embedding; without it the vocabulary is padded as the next flag says.",
            _PROVIDER,
        ),
        value(
            "--make-vocab-size-divisible-by",
            positive,
            128,
            "pad the vocabulary to a multiple of this times the tensor parallel size.",
            _STRUCTURE,
        ),
        switch(
            "--untie-embeddings-and-output-weights",
            "give the output layer weights of its own, instead of the embedding's.",
            _PROVIDER,
        ),
        value("--max-position-embeddings", positive, None, "number of positions that the model has.", _PROVIDER),
    ),
)

ATTENTION = Group(
    title="Model: attention",
    flags=(
        value("--num-attention-heads", positive, None, "number of query heads.", _CONFIG),
        switch("--group-query-attention", "let several query heads share a key-value head.", _CONFIG),
        value("--num-query-groups", positive, 1, "number of key-value heads, with --group-query-attention.", _CONFIG),
        value(
            "--kv-channels",
            positive,
            None,
            "width of a head; by default --hidden-size / --num-attention-heads.",
            _CONFIG,
        ),
        switch("--qk-layernorm", "normalise the queries and keys of each head.", _CONFIG),
        switch("--add-qkv-bias", "give the projections to query, key and value a bias.", _CONFIG),
        value("--attention-dropout", fraction, 0.1, "dropout of attention weights.", _CONFIG),
        switch("--attention-softmax-in-fp32", "compute the softmax of attention in fp32.", _CONFIG),
        value(
            "--sliding-window",
            positive,
            None,
            "number of positions that a query sees, itself included; by default all before it.",
            _CONFIG,
        ),
        value(
            "--window-attn-skip-freq",
            layer_pattern,
            None,
            "with --sliding-window: which layers have the window. N: all but each N-th; a list: 1 for each layer that "
            "has it; by default all.",
            _CONFIG,
        ),
    ),
)

POSITIONS = Group(
    title="Model: positions",
    flags=(
        value(
            "--position-embedding-type",
            str,
            "learned_absolute",
            "how tokens know their position.",
            _PROVIDER,
            choices=("learned_absolute", "rope", "none"),
        ),
        switch(
            "--use-rotary-position-embeddings",
            "the same as --position-embedding-type rope.",
            _STRUCTURE,
        ),
        value("--rotary-base", number, 10000.0, "base of rotary positions.", _PROVIDER),
        value("--rotary-percent", fraction, 1.0, "part of a head that turns.", _PROVIDER),
        value(
            "--rope-scaling-type",
            str,
            None,
            "stretch rotary positions beyond those that the model was trained on.",
            _CONFIG,
            choices=("linear", "llama3", "yarn"),
        ),
        value("--rope-scaling-factor", number, 8.0, "how far positions are stretched.", _CONFIG),
        value(
            "--low-freq-factor",
            number,
            None,
            "llama3: bound of the low frequencies; 1 by default.",
            _CONFIG,
        ),
        value(
            "--high-freq-factor",
            number,
            None,
            "llama3: bound of the high frequencies; 4 by default.",
            _CONFIG,
        ),
        value(
            "--original-max-position-embeddings",
            positive,
            None,
            "llama3: positions that the model was trained on at first; 8192 by default.",
            _CONFIG,
        ),
        value(
            "--rope-scaling-original-max-position-embeddings",
            positive,
            None,
            "yarn: positions that the model was trained on at first.",
            _CONFIG,
        ),
        value("--beta-fast", number, 32.0, "yarn: turns above which a frequency stays as it is.", _CONFIG),
        value(
            "--beta-slow",
            number,
            1.0,
            "yarn: turns below which a frequency is stretched in full.",
            _CONFIG,
        ),
        value("--rope-scaling-mscale", number, 1.0, "yarn: scale of attention.", _CONFIG),
        value(
            "--rope-scaling-mscale-all-dim",
            number,
            0.0,
            "yarn: scale of attention, all channels.",
            _CONFIG,
        ),
        value(
            "--rope-scaling-attention-factor",
            number,
            None,
            "yarn: scale of attention, in place of the one that follows from the other flags.",
            _CONFIG,
        ),
    ),
)

LAYERS = Group(
    title="Model: MLP, norms, initial weights",
    flags=(
        switch("--swiglu", "a gated MLP with SiLU.", _CONFIG),
        negative("--disable-bias-linear", "add_bias_linear", "no biases in linear layers.", _CONFIG),
        value("--hidden-dropout", fraction, 0.1, "dropout of hidden states.", _CONFIG),
        value(
            "--normalization",
            str,
            "LayerNorm",
            "kind of norm.",
            _CONFIG,
            choices=("LayerNorm", "RMSNorm"),
        ),
        value("--norm-epsilon", amount, 1e-5, "epsilon of norms.", _CONFIG),
        value("--init-method-std", amount, 0.02, "standard deviation of initial weights.", _CONFIG),
        value(
            "--seed",
            count,
            1234,
            "seed of initial weights, dropout and data order.",
            "training.initialize training.data",
        ),
    ),
)
