"""The arguments that a checkpoint carries: what they say about the model, against those of this run. Needs no torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError

# About the command line itself.
_LEFT_OUT = ("given", "notices")
_PLAIN = (bool, int, float, str, type(None))
# What decides shapes and names of tensors: flag -> its value in arguments.
Getter = Callable[[Mapping[str, Any]], Any]


def _dest(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _of(name: str) -> Getter:
    return lambda args: args.get(name)


def _layers(args: Mapping[str, Any]) -> Any:
    """Layers that hold weights: the argument counts noop layers, too."""
    count = args.get("num_layers")
    return None if count is None else count - len(_numbers(args.get("noop_layers")))


def _query_groups(args: Mapping[str, Any]) -> Any:
    # Converters write the number without the switch.
    return args.get("num_query_groups" if args.get("group_query_attention", True) else "num_attention_heads")


def _ffn(args: Mapping[str, Any]) -> Any:
    # Of a model with experts programs write either of two sizes; the shapes of tensors tell.
    return None if args.get("num_experts") else args.get("ffn_hidden_size")


def _numbers(value: Any) -> tuple[int, ...]:
    """A list of numbers as arguments of different programs hold it."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return tuple(int(part) for part in value.split(","))
    return tuple(sorted(value)) if isinstance(value, set | frozenset) else tuple(value)


def _or_none(name: str, read: Callable[[Any], Any]) -> Getter:
    """What a value means, where it is said."""
    return lambda args: read(args[name]) if name in args else None


_STRUCTURE: dict[str, Getter] = {
    "--num-layers": _layers,
    "--hidden-size": _of("hidden_size"),
    "--ffn-hidden-size": _ffn,
    "--num-attention-heads": _of("num_attention_heads"),
    "--num-query-groups": _query_groups,
    "--kv-channels": _of("kv_channels"),
    "--untie-embeddings-and-output-weights": _of("untie_embeddings_and_output_weights"),
    "--add-qkv-bias": _of("add_qkv_bias"),
    "--qk-layernorm": _of("qk_layernorm"),
    "--swiglu": _of("swiglu"),
    "--num-experts": _of("num_experts"),
    "--moe-ffn-hidden-size": _of("moe_ffn_hidden_size"),
    "--moe-shared-expert-intermediate-size": _of("moe_shared_expert_intermediate_size"),
    "--multi-latent-attention": _of("multi_latent_attention"),
}
# What changes the function that the weights stand for, while they fit all the same.
_FUNCTION = {
    flag: _of(_dest(flag))
    for flag in (
        "--rotary-base",
        "--rotary-percent",
        "--rope-scaling-type",
        "--rope-scaling-factor",
        "--norm-epsilon",
        "--normalization",
        "--position-embedding-type",
        "--moe-router-topk",
        "--norm-topk-prob",
    )
}
# What decides which sample has which number.
_SAMPLES = {
    flag: _or_none(_dest(flag), lambda value: tuple(value) if isinstance(value, list) else value)
    for flag in (
        "--seq-length",
        "--seed",
        "--split",
        "--data-path",
        "--train-data-path",
        "--mock-data",
        "--no-shuffle",
        "--full-shuffle-instruction-dataset",
        "--pack",
        "--neat-pack",
        "--padded-samples",
    )
}
_SAMPLES |= {flag: _or_none(_dest(flag), lambda value: value or "none") for flag in ("--handler-name", "--prompt-type")}
# With --padded-samples the data are filled up to whole global batches in each epoch.
_SAMPLES["--global-batch-size"] = lambda args: args.get("global_batch_size") if args.get("padded_samples") else None
_VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
# What a rank file of format torch is bound to.
_TOPOLOGY: dict[str, Getter] = {
    "--tensor-model-parallel-size": _of("tensor_model_parallel_size"),
    "--pipeline-model-parallel-size": _of("pipeline_model_parallel_size"),
    "--expert-model-parallel-size": _of("expert_model_parallel_size"),
    "--expert-tensor-parallel-size": lambda a: a.get("num_experts") and a.get("expert_tensor_parallel_size"),
    "--num-layers-per-virtual-pipeline-stage": _or_none(
        "virtual_pipeline_model_parallel_size", lambda value: value or 0
    ),
    "--num-layer-list": _or_none("num_layer_list", _numbers),
    "--noop-layers": _or_none("noop_layers", _numbers),
    "--moe-grouped-gemm": lambda a: a.get("num_experts") and a.get("moe_grouped_gemm"),
    "--padded-vocab-size": _of("padded_vocab_size"),
}


def plain_args(args: Namespace, **more: Any) -> Namespace:
    """The arguments that are plain values, with `more`: what a checkpoint carries."""
    kept = {name: _plain(value) for name, value in vars(args).items() if name not in _LEFT_OUT and _is_plain(value)}
    return Namespace(**kept, **more)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(entry) for key, entry in value.items())
    return isinstance(value, (*_PLAIN, Path))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map(_plain, value))
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return str(value) if isinstance(value, Path) else value


def check_structure(saved: Mapping[str, Any], args: Namespace, folder: Path) -> str | None:
    """The text to log about what else differs, or None.

    Raises:
        UserError: the checkpoint is of a model of another structure; names flags and values.
    """
    if wrong := _differences(_STRUCTURE, saved, args):
        raise UserError(
            f"--load {folder}: the checkpoint is of another model: {', '.join(wrong)}; set the flags as they were, or "
            "name another checkpoint"
        )
    notices = []
    if changed := _differences(_FUNCTION, saved, args):
        notices.append(f"flags that differ from those of the checkpoint: {', '.join(changed)}")
    if not args.finetune and (changed := _differences(_SAMPLES, saved, args)):
        notices.append(
            f"the samples are not those of the checkpoint ({', '.join(changed)}): the run goes on at the same number, "
            "so that some come twice and others never (--finetune starts with the first)"
        )
    return "; ".join(notices) or None


def check_topology(saved: Mapping[str, Any], args: Namespace, folder: Path) -> None:
    """Check that rank files of format torch fit the ranks of this run.

    Raises:
        UserError: names flags and values.
    """
    if not (wrong := _differences(_TOPOLOGY, saved, args)):
        return
    raise UserError(
        f"--load {folder}: its files (--ckpt-format torch) are cut for other ranks: {', '.join(wrong)}; set the flags "
        "as they were. Weights alone are cut anew by convert_ckpt_v2.py; a whole run goes on with other ranks from a "
        "checkpoint that was saved with --ckpt-format torch_dist"
    )


def _differences(getters: Mapping[str, Getter], saved: Mapping[str, Any], args: Namespace) -> list[str]:
    """What differs, of that which both sides say."""
    own, found = vars(args), []
    # A converter that does not say it has counted them.
    saved = {"noop_layers": own.get("noop_layers"), **saved}
    for flag, get in getters.items():
        before, now = get(saved), get(own)
        if before is None or now is None or before == now:
            continue
        if flag == _VIRTUAL:
            flag, before, now = "virtual stages (" + flag + ")", before or "none", now or "none"
        found.append(f"{flag} {_shown(now)} instead of {_shown(before)}")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
