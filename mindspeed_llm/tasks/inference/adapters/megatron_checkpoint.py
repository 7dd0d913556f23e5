"""The arguments that a checkpoint of the Megatron backend carries, put in place of flags that nobody has given."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError

_FREE = frozenset(
    ("spec", "model_from_hf", "padded_vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings")
) | frozenset(("init_method_std", "seed", "moe_grouped_gemm", "moe_router_bias_update_rate", "num_query_groups"))
"""Arguments of a model that a checkpoint does not decide."""
_DERIVED = frozenset(("model_from_hf", "use_rotary_position_embeddings", "seed"))
"""Arguments of a model that are of no use to another command."""
_TOKENIZER = ("tokenizer_type", "tokenizer_name_or_path", "tokenizer_model", "vocab_file", "merge_file")
_OWN_SPECS = "mindspeed_llm."
_LORA = ("lora_target_modules", "lora_r", "lora_alpha")
_LISTS = ("moe_layer_freq", "window_attn_skip_freq")
"""Arguments that may have an element for each layer, noop layers included."""


def apply_checkpoint(args: Namespace) -> str:
    """Put what the checkpoint of `args.load` says about its model into `args`, where no flag says it: the structure,
    on an accelerator the dtype, its adapters unless `args.lora_load` names others, and the tokenizer unless flags name
    one. Returns the text that says what was set; empty where the checkpoint carries no arguments.

    With `args.model_from_hf` the structure is that of config.json.

    How the training run was spread over ranks is no matter. To be called before any check of `args` and once; needs
    torch, and no process group.

    Raises:
        UserError: flags contradict the checkpoint, or there is none.
    """
    from mindspeed_llm.platform.device import device_type
    from mindspeed_llm.tasks.inference.adapters.megatron_arguments import model_arguments

    name_checkpoint(args)
    source, saved = saved_arguments(Path(args.load), args.ckpt_step if args.lora_load is None else None)
    taken: dict[str, Any] = {}
    if saved and args.model_from_hf is None:
        of_model = _of_model(saved, model_arguments())
        _check_spec(of_model, args, source)
        _check(args, of_model, source)
        taken = {name: value for name, value in of_model.items() if name not in args.given}
        _place_layers(args, taken)
        _fit_vocabulary(args, taken)
    if saved:
        if device_type() != "cpu" and getattr(args, "dtype", "auto") == "auto" and not (args.bf16 or args.fp16):
            taken |= {name: bool(saved.get(name)) for name in ("bf16", "fp16")}
        if not any(name in args.given for name in _TOKENIZER):
            taken |= _tokenizer(saved)
    if args.lora_load is None:
        taken |= _of_adapters(saved, args)
    for name, value in taken.items():
        setattr(args, name, value)
    return _text(source, taken)


def apply_adapters(args: Namespace) -> str:
    """Put what the adapters of `args.lora_load` say about themselves into `args`, where no flag says it; as
    `apply_checkpoint`, which comes before, or `--model-from-hf`.

    Raises:
        UserError: there are none.
    """
    from mindspeed_llm.tasks.checkpoint.peft_config import CONFIG
    from mindspeed_llm.tasks.checkpoint.peft_files import is_peft

    name_checkpoint(args)
    folder = Path(args.lora_load)
    if is_peft(folder):
        source, saved = folder / CONFIG, _of_peft(folder, args)
    else:
        source, saved = saved_arguments(folder, args.ckpt_step, flag="--lora-load")
    taken = _of_adapters(saved, args)
    for name, value in taken.items():
        setattr(args, name, value)
    return _text(source, taken)


def name_checkpoint(args: Namespace) -> None:
    """Turn a path to one checkpoint (`iter_0000020`) into its folder, in `load`, and its step, in `ckpt_step`; the same
    for `lora_load`, of which `ckpt_step` is the step where both are given.

    Raises:
        UserError: it has another name, or --ckpt-step another number; or it is a release, and another checkpoint of its
            folder would be loaded.
    """
    from mindspeed_llm.training.checkpointing.layout import check_release, format_of, iterations_in

    for flag, name in (("--load", "load"), ("--lora-load", "lora_load")):
        if getattr(args, name) is None:
            continue
        folder = Path(getattr(args, name))
        if check_release(folder, flag):
            setattr(args, name, str(folder.parent))
            continue
        if format_of(folder) is None:
            continue
        step = next((n for n in iterations_in(folder.parent) if folder.name == f"iter_{n:07d}"), None)
        if step is None:
            raise UserError(
                f"{flag} {folder} is one checkpoint, but its name does not say of which step; name it iter_ and seven "
                "digits, as it was, in a folder of its own"
            )
        if args.ckpt_step not in (None, step):
            raise UserError(f"--ckpt-step {args.ckpt_step} contradicts {flag} {folder}; leave one of them out")
        setattr(args, name, str(folder.parent))
        args.ckpt_step = step


def saved_arguments(folder: Path, step: int | None, *, flag: str = "--load") -> tuple[Path, Mapping[str, Any]]:
    """The file with the arguments of the checkpoint that will be loaded, or would be if it is whole, and what it says.

    Raises:
        UserError: there is none, or its file cannot be read.
    """
    from mindspeed_llm.tasks.checkpoint.torch_file import read_torch_file
    from mindspeed_llm.training.checkpointing.content import arguments_of
    from mindspeed_llm.training.checkpointing.layout import COMMON_FILE, RANK_FILE, RELEASE, iteration_name
    from mindspeed_llm.training.checkpointing.publishing import look

    shelf = look(folder)
    wanted = step if step is not None else shelf.tracker.iteration
    if wanted is None and not shelf.tracker.is_release:
        wanted = shelf.iterations[-1] if shelf.iterations else None
    if wanted is None and not shelf.tracker.is_release:
        raise UserError(f"{flag} {folder} holds no checkpoint; expected folders named iter_ and seven digits")
    place = folder / (RELEASE if wanted is None else iteration_name(wanted))
    files = [place / COMMON_FILE, *sorted(place.glob(f"mp_rank_*/{RANK_FILE}"))]
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        there = ", ".join(map(str, shelf.iterations[-5:])) or "none"
        raise UserError(f"{flag} {folder}: {place.name} holds no checkpoint; steps that are there: {there}")
    content = read_torch_file(file)
    return file, arguments_of(content) if isinstance(content, Mapping) else {}


def _of_model(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The arguments that describe the model, as flags have them, without noop layers."""
    found = {name: _plain(saved[name]) for name in names if saved.get(name) is not None and name not in _DERIVED}
    if "num_query_groups" in found and not saved.get("group_query_attention", True):
        del found["num_query_groups"]
    elif "num_query_groups" in found:
        found["group_query_attention"] = True
    noops = set(_numbers(saved.get("noop_layers")))
    if noops and "num_layers" in found:
        found["num_layers"] -= len(noops)
        for name in _LISTS:
            if isinstance(found.get(name), tuple):
                found[name] = tuple(value for position, value in enumerate(found[name]) if position not in noops)
    return found


def _check_spec(of_model: Mapping[str, Any], args: Namespace, source: Path) -> None:
    """What a file names is not imported, unless it is of this package."""
    spec = of_model.get("spec")
    if spec and "spec" not in args.given and not str(spec[0]).startswith(_OWN_SPECS):
        raise UserError(
            f"{source}: the model has layers of another package, which is not loaded because a checkpoint says so; "
            f"give --spec {' '.join(map(str, spec))}"
        )


def _check(args: Namespace, of_model: Mapping[str, Any], source: Path) -> None:
    noops = len(args.noop_layers or ())
    wrong = []
    for name in args.given:
        if name not in of_model or name in _FREE:
            continue
        mine, its = getattr(args, name), of_model[name]
        if name == "num_layers":
            mine -= noops
        if name in _LISTS and (noops or not isinstance(mine, type(its))):
            continue  # the same may be said in other ways
        if mine != its:
            wrong.append(f"--{name.replace('_', '-')} {_shown(mine)} (the checkpoint: {_shown(its)})")
    if wrong:
        raise UserError(
            f"flags contradict the arguments in {source}: {', '.join(wrong)}; leave them out, or name another "
            "checkpoint"
        )


def _place_layers(args: Namespace, taken: dict[str, Any]) -> None:
    """Count the noop layers of this job, where flags say some."""
    noops = args.noop_layers or ()
    if not noops or "num_layers" not in taken:
        return
    taken["num_layers"] += len(noops)
    for name in _LISTS:
        if isinstance(taken.get(name), tuple):
            values = iter(taken[name])
            taken[name] = tuple(0 if n in noops else next(values) for n in range(taken["num_layers"]))


def _fit_vocabulary(args: Namespace, taken: dict[str, Any]) -> None:
    """Rows of the embedding that stand for no token may be fewer or more, as the ranks need."""
    padded = taken.get("padded_vocab_size")
    if padded is not None and (padded % args.tensor_model_parallel_size or "vocab_size" in args.given):
        taken.setdefault("vocab_size", args.vocab_size if "vocab_size" in args.given else padded)
        del taken["padded_vocab_size"]


def _tokenizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer of the run, where its files are still there."""
    found = {name: saved[name] for name in _TOKENIZER if saved.get(name)}
    files = [Path(value) for name, value in found.items() if name != "tokenizer_type"]
    return found if files and all(path.exists() for path in files) else {}


def _of_adapters(saved: Mapping[str, Any], args: Namespace) -> dict[str, Any]:
    if not saved.get("lora_target_modules"):
        return {}
    return {name: _plain(saved[name]) for name in _LORA if saved.get(name) and name not in args.given}


def _of_peft(folder: Path, args: Namespace) -> Mapping[str, Any]:
    """What PEFT's files say, in the words of flags; nothing where it is not known for which model they are."""
    from mindspeed_llm.tasks.checkpoint.arguments import from_hf_config, language_model
    from mindspeed_llm.tasks.checkpoint.families import of_config
    from mindspeed_llm.tasks.checkpoint.hf_reader import read_config
    from mindspeed_llm.tasks.checkpoint.peft_files import open_peft
    from mindspeed_llm.training.folders import hf_directory

    model = hf_directory(args) or (Path(args.model_from_hf) if args.model_from_hf else None)
    if model is None:
        return {}
    config, where = language_model(read_config(model)), str(model / "config.json")
    family = of_config(config, where, requested=args.model_type_hf)
    adapter = open_peft(folder, family, from_hf_config(family, config, where))
    return {"lora_target_modules": adapter.targets, "lora_r": adapter.rank, "lora_alpha": adapter.alpha}


def _numbers(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        return tuple(int(part) for part in value.split(",") if part)
    return tuple(value or ())


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _text(source: Path, taken: Mapping[str, Any]) -> str:
    """What was set, as flags that say the same."""
    from mindspeed_llm.training.arguments.parser import all_flags

    flags = {flag.dest: flag for flag in all_flags().values()}
    words = []
    for name, value in taken.items():
        if name in flags and flags[name].parsing.get("action") is not None:
            words += [flags[name].name] if value != flags[name].default else []
        elif value is not None:
            words.append(f"--{name.replace('_', '-')} {_shown(value)}")
    return f"{source} sets: {' '.join(words)}" if words else ""
