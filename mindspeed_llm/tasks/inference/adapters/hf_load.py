"""A backend from files: a Hugging Face directory, an adapter in PEFT's format, or a checkpoint of the FSDP2 backend."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.platform import distributed
from mindspeed_llm.platform.device import current_device
from mindspeed_llm.tasks.inference.adapters.hf import HFBackend
from mindspeed_llm.tasks.inference.kinds import Kind

if TYPE_CHECKING:
    from mindspeed_llm.fsdp2.config.model_config import ModelConfig

logger = get_logger(__name__)

DType = Literal["auto", "fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODEL, _ADAPTER = "model.model_name_or_path", "model.adapter_name_or_path"
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
    if kind == "hf":
        folder = _local_folder(str(path))
        model = _load_directory(folder, dtype=dtype, device=device, shard=shard, trust_remote_code=trust_remote_code)
        tokenizer = folder
    else:
        raise AssertionError(kind)
    return HFBackend(_ready(model), device=device, is_sharded=shard), tokenizer


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    model.config.use_cache = True
    return model.eval().requires_grad_(False)


@contextmanager
def _naming(flag: str) -> Iterator[None]:
    """Errors about files name the flag that they were found by, not the field of a training run."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace(_MODEL, flag).replace(_ADAPTER, flag)) from error


def _local_folder(text: str) -> Path:
    """The folder itself, or for a hub id where its files lie: fetched, unless HF_HUB_OFFLINE is set."""
    if Path(text).is_dir():
        return Path(text)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, ignore_patterns=["*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf"]))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--load {text} is no folder here, and as a hub id it could not be fetched ({error}). Name the folder of a "
            "model, or a hub id that can be reached"
        ) from error


def _chosen_dtype(dtype: DType, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    said = config.get_text_config().dtype
    return said if isinstance(said, torch.dtype) else torch.bfloat16


def _load_directory(
    folder: Path, *, dtype: DType, device: torch.device, shard: bool, trust_remote_code: bool
) -> PreTrainedModel:
    from mindspeed_llm.fsdp2.config.model_config import ModelConfig
    from mindspeed_llm.fsdp2.config.model_files import check_model_files
    from mindspeed_llm.fsdp2.models.model_factory import load_model_config

    named = ModelConfig(model_name_or_path=str(folder), trust_remote_code=trust_remote_code)
    with _naming("--load"):
        check_model_files(named)
        config = load_model_config(named)
        chosen = _chosen_dtype(dtype, config, device)
        if getattr(config, "quantization_config", None) is None:
            _check_weights(named, config)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=chosen, trust_remote_code=trust_remote_code
    ).to(device)


def _check_weights(named: ModelConfig, config: PretrainedConfig) -> None:
    """Compare the headers of the files with the model: transformers would fill gaps with random numbers."""
    from mindspeed_llm.fsdp2.models.model_factory import check_weights

    check_weights(named, _on_meta(named, config))


def _on_meta(named: ModelConfig, config: PretrainedConfig) -> PreTrainedModel:
    from mindspeed_llm.fsdp2.config.config import Config
    from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
    from mindspeed_llm.fsdp2.models.model_factory import build_on_meta

    # A copy: building a model notes its type and implementations in the configuration.
    run = Config(model=named, training=TrainingConfig(output_dir=""))
    return build_on_meta(run, copy.deepcopy(config))
