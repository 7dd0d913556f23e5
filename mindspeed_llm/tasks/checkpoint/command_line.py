"""The flags of `convert_ckpt_v2.py`. Reading them loads no torch, so that a typo is answered at once."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest

DESCRIPTION = "Convert weights between Hugging Face model directories and Megatron checkpoints."
# Flags of upstream that can have no effect here -> why.
NO_EFFECT = {"save_layer_by_layer": "weights are always streamed, memory does not grow with the model"}
# A Megatron input says itself how it is split: these describe an output and are not needed for a Hugging Face one.
_SIZES = {
    "target_tensor_parallel_size": "tp",
    "target_pipeline_parallel_size": "pp",
    "target_expert_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
# How an output will be stored; with a Hugging Face output, how the input is, where it does not say so itself.
_STORAGE = {
    "num_layers_per_virtual_pipeline_stage": "layers_per_virtual_stage",
    "num_layer_list": "num_layer_list",
    "noop_layers": "noop_layers",
    "schedules_method": "schedules_method",
    "mtp_num_layers": "mtp_num_layers",
    "moe_tp_extend_ep": "moe_tp_extend_ep",
    "moe_grouped_gemm": "moe_grouped_gemm",
    "mla_mm_split": "mla_mm_split",
    "transformer_impl": "transformer_impl",
    "padded_vocab_size": "padded_vocab_size",
}
# What an input without arguments is like, as files of upstream's converter for mamba2 are.
_SETTINGS = {
    "hidden_size": "hidden_size",
    "mamba_state_dim": "mamba_state_dim",
    "mamba_num_groups": "mamba_num_groups",
    "mamba_head_dim": "mamba_head_dim",
}
_INPUT = {"input_tp_rank": "tp", "input_pp_rank": "pp"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def parse(argv: Sequence[str]) -> ConversionRequest:
    """The request that the command line says; `--help` prints and exits.

    Raises:
        UserError: an unknown flag (names the nearest), a value of the wrong kind, flags that contradict each other.
    """
    parser = _parser()
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise UserError(_unknown(unknown[0], parser))
    given = vars(known)
    # Not argparse's `required`, which would complain before a misspelt flag is named.
    if absent := [name for name in ("load_dir", "save_dir") if given[name] is None]:
        raise UserError(f"--{absent[0].replace('_', '-')} is missing; expected a folder")
    for name, reason in NO_EFFECT.items():
        if given[name]:
            print(f"--{name.replace('_', '-')} has no effect: {reason}")
    if (given["load_model_type"], given["save_model_type"]) == ("hf", "hf"):
        raise UserError("--load-model-type hf and --save-model-type hf: nothing to convert; one of them must be mg")
    to_mg = given["save_model_type"] == "mg"
    if not to_mg and (sizes := [name for name in _SIZES if given[name] not in (None, 1)]):
        print(f"--{sizes[0].replace('_', '-')} has no effect: a Hugging Face output is not split")
    storage = _chosen(given, _STORAGE)
    return ConversionRequest(
        load_model_type=given["load_model_type"],
        save_model_type=given["save_model_type"],
        load_dir=given["load_dir"],
        save_dir=given["save_dir"],
        model_type_hf=given["model_type_hf"],
        hf_cfg_dir=given["hf_cfg_dir"],
        target=_chosen(given, _SIZES) | storage if to_mg else {},
        loaded=_chosen(given, _INPUT) | ({} if to_mg else storage),
        settings=_chosen(given, _SETTINGS),
        num_layers=given["num_layers"],
        first_k_dense_replace=given["first_k_dense_replace"],
        make_vocab_size_divisible_by=given["make_vocab_size_divisible_by"],
        params_dtype=given["params_dtype"],
        max_shard_size=given["max_shard_size"],
        workers=given["workers"],
        verify=given["verify"],
        overwrite=given["overwrite"],
        dry_run=given["dry_run"],
    )


def _chosen(given: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {field: given[flag] for flag, field in names.items() if given[flag] is not None}


def _parser() -> _Parser:
    parser = _Parser(prog="convert_ckpt_v2.py", description=DESCRIPTION, allow_abbrev=False)

    def group(title: str) -> Callable[..., Any]:
        return parser.add_argument_group(title).add_argument

    add = group("what to convert")
    add("--load-model-type", nargs="?", const="hf", default="hf", choices=("hf", "mg"), help="what is in --load-dir")
    add(
        "--save-model-type",
        nargs="?",
        const="mg",
        default="mg",
        choices=("hf", "mg"),
        help="what to write",
    )
    add("--load-dir", type=Path, help="required")
    add("--save-dir", type=Path, help="required; a folder that does not exist yet, or holds no weights")
    add("--model-type-hf", help="model family; read off config.json when left out")
    add("--hf-cfg-dir", type=Path, help="Hugging Face folder to take config.json, tokenizer and template from")
    add("--params-dtype", choices=("fp32", "fp16", "bf16"), help="change the dtype of the weights")
    add("--max-shard-size", type=_bytes, default=5 * 10**9, help="of a Hugging Face weight file: 5GB, 500MB, bytes")
    add("--workers", type=_positive, default=min(os.cpu_count() or 1, 8), help="threads")
    add(
        "--verify",
        choices=("full", "sample", "none"),
        default="sample",
        help="compare the output with its source before it is published: all of it, a part of each tensor, nothing",
    )
    add("--overwrite", action="store_true", help="replace an earlier conversion in --save-dir")
    add("--dry-run", action="store_true", help="print which tensor goes where, and write nothing")
    add("--debug", action="store_true", help="show tracebacks")

    add = group("how a Megatron checkpoint is split")
    add("--target-tensor-parallel-size", type=_positive)
    add("--target-pipeline-parallel-size", type=_positive)
    add("--target-expert-parallel-size", type=_positive)
    add("--expert-tensor-parallel-size", type=_positive, help="1 or the tensor parallel size, which is the default")
    add("--num-layers-per-virtual-pipeline-stage", type=_positive)
    add("--num-layer-list", type=_numbers, help="layers of each pipeline stage: 5,5,4,4")
    add("--noop-layers", type=_numbers, help="positions of empty layers, counted with them: 0,5")
    add("--schedules-method", choices=("dualpipev",))
    add("--moe-tp-extend-ep", action="store_true", default=None, help="spread whole experts over EP x TP")

    add = group("how a Megatron checkpoint stores its parameters")
    add("--transformer-impl", choices=("local", "transformer_engine"))
    add("--moe-grouped-gemm", action="store_true", default=None)
    add("--mla-mm-split", action="store_true", default=None)
    add("--make-vocab-size-divisible-by", type=_positive, default=1, help="times the tensor parallel size")
    add("--padded-vocab-size", type=_positive, help="rows of the embedding; overrides the flag before")

    add = group("which layers")
    add("--mtp-num-layers", type=_count, help="multi-token prediction layers to convert")
    add("--num-layers", type=_positive, help="only the first so many layers, noop and MTP layers not counted")
    add("--first-k-dense-replace", type=_count, help="keep only so many of the dense layers at the start")

    add = group("a Megatron input that carries no arguments")
    add("--input-tp-rank", type=_positive, help="its tensor parallel size")
    add("--input-pp-rank", type=_positive, help="its pipeline parallel size")
    for name in _SETTINGS:
        add(f"--{name.replace('_', '-')}", type=_positive)

    add = group("no effect")
    for name in NO_EFFECT:
        add(f"--{name.replace('_', '-')}", action="store_true", help=NO_EFFECT[name])
    return parser


def _unknown(argument: str, parser: argparse.ArgumentParser) -> str:
    name = argument.split("=")[0]
    flags = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(name, flags, n=1, cutoff=0.5)
    if not name.startswith("-"):
        return f"{argument!r} stands alone; expected a flag, or a value behind one"
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _count(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least {least}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}; expected numbers with commas, such as 0,5")
    return tuple(int(part) for part in text.split(","))


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", text.upper())
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a size such as 5GB, 500MB or a number of bytes")
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2] or " "))
