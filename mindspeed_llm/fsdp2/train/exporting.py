"""What a run leaves behind in Hugging Face's and PEFT's formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.fsdp2.checkpoint.hf_export import export_model
from mindspeed_llm.fsdp2.checkpoint.hf_writer import let_generation_stop
from mindspeed_llm.fsdp2.checkpoint.publish import MERGED
from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
from mindspeed_llm.fsdp2.distributed.fsdp import DTYPES
from mindspeed_llm.fsdp2.models.model_factory import BuiltModel
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.platform import distributed

logger = get_logger(__name__)


def export_trained(
    built: BuiltModel, folder: Path, *, training: TrainingConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the model in Hugging Face format to `folder` (a collective).

    With adapters these go there, in PEFT's format, and with `training.merge_adapter` the model to `merged` in it.
    Exports of an earlier run in the folder and in `merged` are replaced, whatever they hold.
    """
    if built.adapter is None:
        _export_model(built, folder, training=training, tokenizer=tokenizer)
        return
    from mindspeed_llm.fsdp2.checkpoint.adapter_export import adapter_changes, export_adapter

    export_adapter(
        built.model,
        folder,
        config=built.adapter,
        dtype=DTYPES[training.hf_export_dtype or "fp32"],
        is_writer=distributed.is_rank_zero(),
        save_tokenizer=tokenizer.save_pretrained,
    )
    dist.barrier()
    logger.info("Exported the adapter in PEFT's format to %s", folder)
    if training.merge_adapter:
        changes = adapter_changes(built.model)
        _export_model(built, folder / MERGED, training=training, tokenizer=tokenizer, changes=changes)


def _export_model(
    built: BuiltModel,
    folder: Path,
    *,
    training: TrainingConfig,
    tokenizer: PreTrainedTokenizerBase,
    changes: Mapping[str, Callable[[], torch.Tensor]] | None = None,
) -> None:
    chosen = training.hf_export_dtype
    let_generation_stop(built.model.generation_config, tokenizer.eos_token_id)
    export_model(
        built.model,
        folder,
        config=built.source_config,
        dtype_of=(lambda name: DTYPES[chosen]) if chosen is not None else built.export_dtype,
        shard_size=training.hf_shard_size,
        is_writer=distributed.is_rank_zero(),
        save_tokenizer=tokenizer.save_pretrained,
        changes=changes,
    )
    dist.barrier()
    logger.info("Exported the model in Hugging Face format to %s", folder)
