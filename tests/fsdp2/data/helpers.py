"""Configurations and data sources for the tests of the data package."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.config.data_config import DataConfig
from mindspeed_llm.fsdp2.config.model_config import ModelConfig
from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
from mindspeed_llm.fsdp2.data.data_factory import DataBundle, DataFactory


def make_config(folder: Path, data: dict[str, Any], **training: Any) -> Config:
    """A configuration with output in `folder` and the given fields of the data and training sections."""
    training = {"output_dir": str(folder / "output"), "per_device_train_batch_size": 2, **training}
    return Config(
        model=ModelConfig(model_name_or_path=str(folder)),
        data=DataConfig(**{"dataset_dir": str(folder), **data}),
        training=TrainingConfig(**training),
    )


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    """Write the rows and return the path as text."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def build(config: Config, tokenizer: Any, *, rank: int = 0, world_size: int = 1) -> DataBundle:
    """The data of one rank."""
    size = config.training.per_device_train_batch_size * config.training.gradient_accumulation_steps * world_size
    return DataFactory(config, tokenizer).build(rank=rank, world_size=world_size, global_batch_size=size)


def rows_of(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of the rows of a batch without their padding; fillers are left out (they have no target)."""
    rows = []
    for i in range(len(batch["input_ids"])):
        mask = batch["attention_mask"]
        length = batch["input_ids"].shape[1] if mask is None else int(mask[i].sum())
        labels = batch["labels"][i].tolist()
        if any(label != -100 for label in labels):
            rows.append((batch["input_ids"][i, :length].tolist(), labels[:length]))
    return rows
