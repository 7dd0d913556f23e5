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
TOPOLOGY_FIELDS = _SIZES | _STORAGE
"""Name of a flag with underscores -> the field of `Topology` that it gives."""
# What an input without arguments is like, as files of upstream's converter for mamba2 are.
_SETTINGS = {
    "hidden_size": "its hidden size",
    "mamba_state_dim": "size of its states",
    "mamba_num_groups": "number of its groups",
    "mamba_head_dim": "width of its heads",
}
_SHARD_SIZE = 5 * 10**9
_NEAR = 0.75
"""How much of a misspelt flag must be right, from 0 to 1: below, what is near is only by chance."""
_INPUT = {"input_tp_rank": "tp", "input_pp_rank": "pp"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def parse(argv: Sequence[str]) -> ConversionRequest:
    """The request that the command line says; `--help` prints and exits.

    Raises:
        UserError: an unknown flag (names the nearest), a value of the wrong kind, flags that contradict each other.
    """
    parser = make_parser()
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
    if to_mg and given["save_lora_to_hf"]:
        raise UserError("--save-lora-to-hf writes PEFT's files; add --save-model-type hf, or leave it out")
    # With an adapter in a Megatron checkpoint they are about that one.
    if given["load_model_type"] == "hf" and given["lora_load"] is None:
        if ranks := [name for name in _INPUT if given[name] is not None]:
            raise UserError(
                f"--{ranks[0].replace('_', '-')} is about a Megatron input, and --load-model-type is hf; leave it out"
            )
    if not to_mg and (sizes := [name for name in _SIZES if given[name] not in (None, 1)]):
        print(f"--{sizes[0].replace('_', '-')} has no effect: a Hugging Face output is not split")
    if to_mg and given["max_shard_size"] != _SHARD_SIZE:
        print("--max-shard-size has no effect: a Megatron output has one file per rank")
    if not to_mg and given["make_vocab_size_divisible_by"] != 1:
        print("--make-vocab-size-divisible-by has no effect: the vocabulary of a Hugging Face output is not filled up")
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
        settings=_chosen(given, {name: name for name in _SETTINGS}),
        num_layers=given["num_layers"],
        first_k_dense_replace=given["first_k_dense_replace"],
        lora_load=given["lora_load"],
        lora_r=given["lora_r"],
        lora_alpha=given["lora_alpha"],
        lora_target_modules=tuple(given["lora_target_modules"]),
        save_lora_to_hf=given["save_lora_to_hf"],
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


def make_parser() -> argparse.ArgumentParser:
    """The parser with all flags in their groups; the reference page is made of it, too."""
    parser = _Parser(prog="convert_ckpt_v2.py", description=DESCRIPTION, allow_abbrev=False)

    def group(title: str, description: str | None = None) -> Callable[..., Any]:
        return parser.add_argument_group(title, description).add_argument

    add = group("what to convert")
    add(
        "--load-model-type",
        nargs="?",
        const="hf",
        default="hf",
        choices=("hf", "mg"),
        help="what --load-dir holds: hf, a Hugging Face model directory; mg, a Megatron checkpoint",
    )
    add(
        "--save-model-type",
        nargs="?",
        const="mg",
        default="mg",
        choices=("hf", "mg"),
        help="what to write; from mg to mg a checkpoint is split anew",
    )
    add(
        "--load-dir",
        type=_folder,
        metavar="FOLDER",
        help="where the weights are (required): of a Megatron checkpoint the folder with "
        "latest_checkpointed_iteration.txt, or that of one iteration",
    )
    add(
        "--save-dir",
        type=_folder,
        metavar="FOLDER",
        help="where to write (required): a folder that does not exist yet, or holds no weights. It appears when all of "
        "it is written and verified",
    )
    add(
        "--model-type-hf",
        type=_text,
        metavar="ID",
        help="model family. Left out: read off config.json or the checkpoint's arguments. An id that contradicts "
        "config.json is refused",
    )
    add(
        "--hf-cfg-dir",
        type=_folder,
        metavar="FOLDER",
        help="Hugging Face folder of the same model. Its config.json is read instead of the one in --load-dir or the "
        "checkpoint's arguments; a Hugging Face output gets config.json, tokenizer and chat template from it",
    )
    add(
        "--params-dtype",
        choices=("fp32", "fp16", "bf16"),
        help="dtype of the written weights. Left out: each tensor keeps its own. What training holds in fp32, such as "
        "the bias of a router, stays as it is",
    )
    add(
        "--max-shard-size",
        type=_bytes,
        default=_SHARD_SIZE,
        metavar="SIZE",
        help="largest weight file of a Hugging Face output: 5GB, 500MB or a number of bytes",
    )
    add(
        "--workers",
        type=_positive,
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="threads. Left out: one for each processor core, at most 8",
    )
    add(
        "--verify",
        choices=("full", "sample", "none"),
        default="sample",
        help="how much of the output is compared with its source before it is published: sample, all names and shapes, "
        "a part of each tensor, and some tensors converted back; full, all values both ways, read from the disk, and "
        "the checksums of the source; none, nothing",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace an earlier conversion in --save-dir; weights that no conversion left there are never removed",
    )
    add("--dry-run", action="store_true", help="print which tensor is made of which, and write nothing")
    add("--debug", action="store_true", help="show the traceback of an error, too")

    add = group(
        "how a Megatron checkpoint is split",
        "Of a Megatron output. With a Hugging Face output the input says itself how it is split: the sizes have no "
        "effect then, and the other flags override what it says.",
    )
    add("--target-tensor-parallel-size", type=_positive, metavar="N", help="ranks that each matrix is cut over (TP)")
    add("--target-pipeline-parallel-size", type=_positive, metavar="N", help="stages that the layers lie on (PP)")
    add(
        "--target-expert-parallel-size",
        type=_positive,
        metavar="N",
        help="ranks that the experts of a layer are dealt out to (EP); divides their number",
    )
    add(
        "--expert-tensor-parallel-size",
        type=_positive,
        metavar="N",
        help="ranks that one expert is cut over (ETP): 1, whole experts, or the tensor parallel size, which is the "
        "default",
    )
    add(
        "--num-layers-per-virtual-pipeline-stage",
        type=_positive,
        metavar="N",
        help="layers of a virtual stage (VPP): each stage then has several blocks of so many layers, and not one block",
    )
    add(
        "--num-layer-list",
        type=_numbers,
        metavar="N,N,...",
        help="layers of each stage, where PP does not divide their number: 5,5,4,4",
    )
    add(
        "--noop-layers",
        type=_numbers,
        metavar="N,N,...",
        help="positions of empty layers, which fill up stages. Positions count the empty layers as well: 0,5 puts four "
        "layers in between",
    )
    add(
        "--schedules-method",
        choices=("dualpipev",),
        help="each stage has a block from the front of the model and one from its end, as this schedule wants it",
    )
    add(
        "--moe-tp-extend-ep",
        action="store_true",
        default=None,
        help="deal whole experts out over EP x TP ranks, and cut none",
    )

    add = group(
        "how a Megatron checkpoint stores its parameters",
        "Of a Megatron output, as training will use it. With a Hugging Face output the input's keys show it; a flag is "
        "needed only where its first stage has no such layer.",
    )
    add(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        help="names of keys: those of Megatron's own layers, or of Transformer Engine's, which hold the norm before "
        "them",
    )
    add(
        "--moe-grouped-gemm",
        action="store_true",
        default=None,
        help="experts of a rank in one tensor per matrix (local), or numbered behind the name (transformer_engine), "
        "instead of one module each",
    )
    add(
        "--mla-mm-split",
        action="store_true",
        default=None,
        help="latent attention: four matrices instead of linear_q_up_proj and linear_kv_up_proj",
    )
    add(
        "--make-vocab-size-divisible-by",
        type=_positive,
        default=1,
        metavar="N",
        help="rows of zeros fill the vocabulary up to a multiple of this times TP; they are cut off again on the way "
        "back",
    )
    add(
        "--padded-vocab-size",
        type=_positive,
        metavar="N",
        help="rows of the embedding over all ranks, as training will have it; overrides the flag before",
    )

    add = group("which layers")
    add(
        "--mtp-num-layers",
        type=_count,
        metavar="N",
        help="multi-token prediction (MTP) layers of a Megatron output. Left out: none; they are named as dropped then",
    )
    add(
        "--num-layers",
        type=_positive,
        metavar="N",
        help="make the output of the first so many layers; noop and MTP layers are not counted. Left out: all",
    )
    add(
        "--first-k-dense-replace",
        type=_count,
        metavar="N",
        help="keep only so many of the dense layers at the start of a model with experts. Left out: all",
    )

    add = group(
        "LoRA",
        "An adapter is merged into the model, or converted alone. Its rank and its layers are read off its tensors, "
        "alpha off its arguments or adapter_config.json; flags that contradict them are refused.",
    )
    add(
        "--lora-load",
        type=_folder,
        metavar="FOLDER",
        help="an adapter to merge into what is in --load-dir: a Megatron checkpoint, split in any way, or PEFT's "
        "files. Left out: the adapter stands in --load-dir, and one of the flags below says that it is wanted",
    )
    add("--lora-r", type=_positive, metavar="N", help="rank of the adapter")
    add(
        "--lora-alpha",
        type=_positive,
        metavar="N",
        help="alpha of the adapter: alpha / r times B A is added. Needed only where the checkpoint does not say it",
    )
    add(
        "--lora-target-modules",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Megatron's layers that the adapter is on: linear_qkv linear_proj linear_fc1 linear_fc2. Adapters on "
        "parts of a fused layer: linear_q linear_k linear_v linear_fc1_gate linear_fc1_up. Where the output is a "
        "Megatron adapter, the form that it gets",
    )
    add(
        "--save-lora-to-hf",
        action="store_true",
        help="write the adapter alone, in PEFT's files, and not the model; it is taken from --lora-load, or from "
        "--load-dir",
    )

    add = group("a Megatron input that carries no arguments", "Such as what upstream's converter makes of Mamba 2.")
    add("--input-tp-rank", type=_positive, metavar="N", help="its tensor parallel size. Left out: read off its folders")
    add("--input-pp-rank", type=_positive, metavar="N", help="its pipeline parallel size, likewise")
    for name, what in _SETTINGS.items():
        add(f"--{name.replace('_', '-')}", type=_positive, metavar="N", help=f"{what}. Left out: as config.json says")

    add = group("no effect")
    for name in NO_EFFECT:
        add(f"--{name.replace('_', '-')}", action="store_true", help=NO_EFFECT[name])
    return parser


def _unknown(argument: str, parser: argparse.ArgumentParser) -> str:
    name = argument.split("=")[0]
    flags = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(name, flags, n=1, cutoff=_NEAR)
    if not name.startswith("-"):
        return f"{argument!r} stands alone; expected a flag, or a value behind one"
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "; see --help")


def _text(text: str) -> str:
    # What a script makes of a variable that is not set.
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; give a value, or leave the flag out")
    return text


def _folder(text: str) -> Path:
    # Path("") would be the current folder.
    return Path(_text(text))


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
