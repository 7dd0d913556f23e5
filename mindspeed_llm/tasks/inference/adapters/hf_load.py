"""A backend from files: a Hugging Face directory, an adapter in PEFT's format, or a checkpoint of the FSDP2 backend."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.platform import distributed
from mindspeed_llm.platform.device import current_device
from mindspeed_llm.tasks.inference.adapters.hf import HFBackend
from mindspeed_llm.tasks.inference.adapters.hf_build import (
    Asked,
    DType,
    build_from_files,
    load_whole,
    merge_adapters,
    prepare_adapters,
)
from mindspeed_llm.tasks.inference.adapters.hf_checkpoint import cached_folder, load_checkpoint
from mindspeed_llm.tasks.inference.adapters.hf_files import check_values, naming
from mindspeed_llm.tasks.inference.adapters.hf_peft import check_mergeable, embedding_adapter, merged_by_peft
from mindspeed_llm.tasks.inference.kinds import Kind

if TYPE_CHECKING:
    from mindspeed_llm.fsdp2.config.model_config import ModelConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_hf(
    path: str | Path,
    kind: Kind,
    *,
    dtype: DType = "auto",
    device: torch.device | None = None,
    base_model: Path | None = None,
    shard: bool = False,
    trust_remote_code: bool = False,
) -> tuple[HFBackend, Path]:
    """Load a model for generation and scoring.

    Under torchrun every rank loads a copy of its own, or with `shard` one copy is spread over all ranks; the process
    group is made where there is none yet.

    Args:
        path: what `kinds.detect` has recognised as `kind` ("hf", "peft" or "fsdp2").
        dtype: of weights and arithmetic; "auto" is fp32 on cpu, whose arithmetic in half precision is slow, and else
            what config.json says (bf16 where it says nothing).
        device: None takes this process's own.
        base_model: the model's directory, where an adapter or a run names one that is not here.
        shard: each rank keeps its part of the weights only (fully_shard), and reads only that.
        trust_remote_code: run the code that comes with the model.

    Returns:
        The backend, and the folder that its tokenizer is in.

    Raises:
        UserError: files are missing, damaged, or do not fit one another; says which.
    """
    device = device or current_device()
    if distributed.world_size() > 1:
        distributed.init_process_group()
    shard = shard and distributed.world_size() > 1
    asked = Asked(dtype=dtype, device=device, shard=shard, trust_remote_code=trust_remote_code)
    with _without_progress_bars():
        if kind == "hf":
            folder = tokenizer = _local_folder(str(path))
            with naming("--load"):
                model = _load_directory(folder, asked)
        elif kind == "peft":
            model, tokenizer = _load_adapter(Path(path), base_model, asked)
        elif kind == "fsdp2":
            model, tokenizer = load_checkpoint(Path(path), base_model, asked)
        else:
            raise AssertionError(f"no kind of this backend: {kind}")
    model.config.use_cache = True
    return HFBackend(model.eval().requires_grad_(False), device=device, is_sharded=shard), tokenizer


def _load_directory(folder: Path, asked: Asked) -> PreTrainedModel:
    from mindspeed_llm.fsdp2.config.model_config import ModelConfig
    from mindspeed_llm.fsdp2.config.model_files import check_model_files

    named = ModelConfig(model_name_or_path=str(folder), trust_remote_code=asked.trust_remote_code)
    check_model_files(named)
    check_values(folder)
    return build_from_files(named, asked) if asked.shard else load_whole(named, asked)


def _load_adapter(folder: Path, base_model: Path | None, asked: Asked) -> tuple[PreTrainedModel, Path]:
    from mindspeed_llm.fsdp2.config.model_config import ModelConfig
    from mindspeed_llm.fsdp2.config.model_files import check_model_files
    from mindspeed_llm.tasks.checkpoint.peft_config import CONFIG, WEIGHTS, read_peft_config

    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"--load {folder} has no {WEIGHTS} beside its {CONFIG}; copy it there, or save the adapter with PEFT's "
            "save_pretrained"
        )
    base = base_of(folder, base_model)
    named = ModelConfig(
        model_name_or_path=str(base),
        adapter_name_or_path=str(folder),
        trust_remote_code=asked.trust_remote_code,
    )
    with naming(f"the model of the adapter {folder}" if base_model is None else "--base-model"):
        check_model_files(dataclasses.replace(named, adapter_name_or_path=None))
    check_values(base)
    check_mergeable(folder / CONFIG)
    why_not_plain = None
    if name := embedding_adapter(folder / WEIGHTS):
        why_not_plain = f"{folder / WEIGHTS} has {name}, which is for an embedding"
    try:
        read_peft_config(folder / CONFIG, may_vary=True)
    except UserError as error:
        why_not_plain = str(error)
    if why_not_plain is None:
        with naming("--load"):
            model = build_from_files(named, asked) if asked.shard else _with_plain_adapter(named, asked)
    elif asked.shard:
        raise UserError(f"--load: {why_not_plain}: another kind of adapter can only be loaded whole on each rank")
    else:
        with naming("--base-model"):
            model = load_whole(named, asked)
        model = merged_by_peft(model, folder)
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    return model, folder if has_tokenizer else base


def base_of(folder: Path, base_model: Path | None = None) -> Path:
    """The directory of the model of an adapter of PEFT: `base_model` (--base-model), or what the adapter names.

    Raises:
        UserError: it is not here.
    """
    from mindspeed_llm.tasks.checkpoint.peft_config import CONFIG

    if base_model is not None:
        return _local_folder(str(base_model), flag="--base-model")
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        said = content.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--load: {folder / CONFIG} cannot be read ({error}); expected a JSON object") from error
    if said and (found := cached_folder(said)).is_dir():
        return found
    where = f"names {said} as its model, which is not here" if said else "does not name its model"
    raise UserError(f"--load {folder}: {CONFIG} {where}; give the model's directory with --base-model")


def _with_plain_adapter(named: ModelConfig, asked: Asked) -> PreTrainedModel:
    from mindspeed_llm.fsdp2.models.adapters import add_adapters, fill_adapters

    model = load_whole(named, asked)
    add_adapters(model, named)
    prepare_adapters(model)
    fill_adapters(model, named, seed=0)
    return merge_adapters(model)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as library

    was_on = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            library.enable_progress_bar()


def _local_folder(text: str, flag: str = "--load") -> Path:
    """The folder itself, or for a hub id where its files lie: fetched, unless HF_HUB_OFFLINE is set."""
    if Path(text).is_dir():
        return Path(text)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, ignore_patterns=["*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf"]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{flag} {text} is no folder here, and as a hub id it could not be fetched ({error}). Name the folder of a "
            "model, or a hub id that can be reached"
        ) from error
