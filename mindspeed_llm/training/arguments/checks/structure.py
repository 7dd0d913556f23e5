"""Sizes of the model, attention, positions, vocabulary."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.arguments.checks.words import divisors, require

_FFN_MULTIPLE = 64
# Of Megatron's --use-rope-scaling, which stands for the models that have it: Llama 3.1.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def check_structure(args: Namespace) -> None:
    """Check the model's sizes, and complete them by Megatron's rules.

    Raises:
        UserError: a size is missing, or sizes do not fit together.
    """
    hint = ", or --model-from-hf DIR, which takes all sizes from a config.json"
    require(args, "--num-layers", f"the number of layers{hint}")
    require(args, "--hidden-size", f"the width of the hidden states{hint}")
    require(args, "--num-attention-heads", f"the number of query heads{hint}")
    require(args, "--max-position-embeddings", f"the number of positions that the model has{hint}")
    require(args, "--seq-length", "the number of tokens of a sample")
    if args.ffn_hidden_size is None:
        wide = 4 * args.hidden_size
        args.ffn_hidden_size = 2 * wide // 3 // _FFN_MULTIPLE * _FFN_MULTIPLE if args.swiglu else wide
        if not args.ffn_hidden_size:
            raise UserError(
                f"--ffn-hidden-size is missing, and --hidden-size {args.hidden_size} is too small to take it from; "
                "give the inner width of the MLP"
            )
    _check_attention(args)
    _check_window(args)
    _check_positions(args)
    check_vocabulary(args)


def _check_attention(args: Namespace) -> None:
    heads, groups = args.num_attention_heads, args.num_query_groups
    if args.kv_channels is None:
        if args.hidden_size % heads:
            raise UserError(
                f"--num-attention-heads {heads} does not divide --hidden-size {args.hidden_size}; give the width of a "
                "head with --kv-channels"
            )
        args.kv_channels = args.hidden_size // heads
    if not args.group_query_attention:
        if "num_query_groups" in args.given and groups != heads:
            raise UserError(
                f"--num-query-groups {groups} goes with --group-query-attention: without it each of the {heads} query "
                "heads has a key-value head of its own; add the one or leave out the other"
            )
        args.num_query_groups = heads
    elif heads % groups:
        raise UserError(
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; expected one of "
            f"{divisors(heads)}"
        )


def _check_window(args: Namespace) -> None:
    pattern = args.window_attn_skip_freq
    if isinstance(pattern, tuple) and len(pattern) != args.num_layers:
        raise UserError(
            f"--window-attn-skip-freq has {len(pattern)} elements; expected one for each layer of --num-layers "
            f"{args.num_layers}"
        )


def _check_positions(args: Namespace) -> None:
    kind = args.position_embedding_type
    if args.use_rotary_position_embeddings:
        if "position_embedding_type" in args.given and kind != "rope":
            raise UserError(
                f"--use-rotary-position-embeddings contradicts --position-embedding-type {kind}; leave one of them out"
            )
        kind = args.position_embedding_type = "rope"
    if args.rope_scaling_type is not None:
        if kind != "rope":
            raise UserError(
                f"--rope-scaling-type {args.rope_scaling_type} goes with --position-embedding-type rope, found {kind}"
            )
        _complete_scaling(args)
    turning = args.kv_channels * args.rotary_percent
    if kind == "rope" and (turning % 2 or not turning):
        raise UserError(
            f"--rotary-percent {args.rotary_percent:g} of --kv-channels {args.kv_channels} is {turning:g} channels "
            "that turn; expected an even number above 0"
        )
    if args.seq_length > args.max_position_embeddings:
        raise UserError(
            f"--seq-length {args.seq_length} is more than --max-position-embeddings {args.max_position_embeddings}, "
            "the positions that the model has; shorten samples or raise the latter"
        )


def _complete_scaling(args: Namespace) -> None:
    if args.rope_scaling_factor < 1:
        raise UserError(f"--rope-scaling-factor {args.rope_scaling_factor:g}: expected 1 or more")
    if args.rope_scaling_type == "llama3":
        for name, standard in _LLAMA3.items():
            if getattr(args, name) is None:
                setattr(args, name, standard)
        if args.low_freq_factor >= args.high_freq_factor:
            raise UserError(
                f"--low-freq-factor {args.low_freq_factor:g}: expected less than --high-freq-factor "
                f"{args.high_freq_factor:g}"
            )
    elif args.rope_scaling_type == "yarn" and args.rope_scaling_original_max_position_embeddings is None:
        raise UserError(
            "--rope-scaling-type yarn needs --rope-scaling-original-max-position-embeddings, the "
            "positions that the model was trained on at first"
        )


def check_vocabulary(args: Namespace, tokenizer_size: int | None = None) -> None:
    """Complete `vocab_size` and `padded_vocab_size`; to be called again once the tokenizer's size is known.

    Without --vocab-size and --padded-vocab-size, both stay None until then.

    Raises:
        UserError: the sizes contradict each other, or the tokenizer has more tokens than the model.
    """
    tp, multiple = args.tensor_model_parallel_size, args.make_vocab_size_divisible_by
    if args.vocab_size is None:
        args.vocab_size = tokenizer_size if args.padded_vocab_size is None else args.padded_vocab_size
    if args.vocab_size is None:
        return
    if args.padded_vocab_size is None:
        unit = multiple * tp
        args.padded_vocab_size = -(-args.vocab_size // unit) * unit
    elif args.padded_vocab_size % tp or args.padded_vocab_size < args.vocab_size:
        raise UserError(
            f"--padded-vocab-size {args.padded_vocab_size}: expected a multiple of --tensor-model-parallel-size {tp} "
            f"of at least {args.vocab_size}, the vocabulary; {-(-args.vocab_size // tp) * tp} would do"
        )
    if tokenizer_size is not None and tokenizer_size > args.padded_vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer_size} tokens, the model {args.padded_vocab_size} (--padded-vocab-size or "
            "--vocab-size, padded); give the tokenizer of this model, or raise the size"
        )
