"""A Hugging Face model directory: weight files laid out first and filled afterwards, and what stands beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_llm.tasks.checkpoint.fill import OpenFile
from mindspeed_llm.tasks.checkpoint.plan import Plan, TargetFile
from mindspeed_llm.tasks.checkpoint.safetensors_file import INDEX, ShardPlan, header, index_text
from mindspeed_llm.tasks.checkpoint.staging import write_text

CONFIG = "config.json"
# Tokenizer, chat template, generation config, code of models that bring their own.
_BESIDE_WEIGHTS = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    "tokenization_*.py",
    "configuration_*.py",
    "modeling_*.py",
)
# What is written is never quantised: nothing beside it may say so.
_OF_QUANTISED = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# With it, transformers would look for an adapter beside the weights.
_OF_ADAPTER = "adapter_config.json"
_NOT_COPIED = ("*.index.json", CONFIG, "conversion_report.json", _OF_ADAPTER, *_OF_QUANTISED)


def lay_out(folder: Path, file: TargetFile) -> OpenFile:
    """Write a weight file's header and make room for its tensors."""
    path = folder / file.path
    start, offsets, size = header({target.key: (target.dtype, target.shape) for target in file.targets})
    with path.open("wb") as stream:
        stream.write(start)
        stream.truncate(size)
    return OpenFile(path=path, targets=file.targets, offsets=offsets)


def write_index(folder: Path, plan: Plan) -> None:
    """Write the weight index; one file alone has none."""
    if len(plan.files) > 1:
        names = [(file.path, [target.key for target in file.targets]) for file in plan.files]
        write_text(folder / INDEX, index_text(ShardPlan(files=names, total_size=plan.nbytes)))


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json."""
    write_text(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def copy_beside(source: Path, folder: Path) -> list[str]:
    """Copy what belongs to a model beside its weights and config.json; gives the names."""
    skipped = {path.name for pattern in _NOT_COPIED for path in source.glob(pattern)}
    names = sorted({path.name for pattern in _BESIDE_WEIGHTS for path in source.glob(pattern)} - skipped)
    for name in names:
        shutil.copyfile(source / name, folder / name)
        with (folder / name).open("rb") as stream:
            os.fsync(stream.fileno())
    return names
