"""`train_fsdp2.py --check`: validate everything that training would find out late, and print what a run will need."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import PretrainedConfig

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.distributed.fsdp import DTYPES
from mindspeed_llm.fsdp2.models.counts import ModelSize, model_size
from mindspeed_llm.fsdp2.models.model_factory import build_on_meta
from mindspeed_llm.fsdp2.models.preflight import preflight
from mindspeed_llm.fsdp2.models.trainable import choose_trainable
from mindspeed_llm.fsdp2.plan.activations import BALANCED_EXPERTS, register_balanced_experts
from mindspeed_llm.fsdp2.plan.data_sample import DataSample, sample_data
from mindspeed_llm.fsdp2.plan.memory import MemoryPlan, plan_memory

_GIB = 1024**3


def print_plan(config: Config, *, world_size: int) -> None:
    """Check tokenizer, model files, data records and disk space, and print the plan of the run on `world_size` ranks.

    Nothing is trained, written or loaded beyond headers and the first records.

    Raises:
        UserError: for the first thing that would stop the run.
    """
    checked = preflight(config)
    samples = sample_data(config, checked.tokenizer)
    size = model_size(checked.model)
    _check_disk(config, size)
    shards = config.parallel.resolved_fsdp_size(world_size)
    memory, unknown = plan_memory(_traceable(config, checked.model_config), config, shards=shards)
    lines = [
        *_model_lines(config, type(checked.model).__name__, size),
        *_batch_lines(config, world_size, shards),
        *[_data_line(sample) for sample in samples],
        *[f"  skipped        {line}" for sample in samples for line in sample.skipped],
        *_memory_lines(memory, unknown),
        "The configuration is valid.",
    ]
    print("\n".join(lines))


def _traceable(config: Config, model_config: PretrainedConfig) -> torch.nn.Module:
    """The model again, with experts that run without values."""
    register_balanced_experts()
    model = build_on_meta(config, model_config, experts=BALANCED_EXPERTS)
    choose_trainable(model, config.model)
    return model


def _model_lines(config: Config, name: str, size: ModelSize) -> list[str]:
    return [
        f"Model            {config.model.model_name_or_path} ({name})",
        f"  parameters     {size.total:,}" + (f" ({size.active:,} per token)" if size.active < size.total else ""),
        *([f"  trained        {size.trainable:,} of them"] if size.trainable < size.total else []),
        f"  compute dtype  {config.parallel.param_dtype}, master weights fp32",
    ]


def _batch_lines(config: Config, world_size: int, shards: int) -> list[str]:
    training = config.training
    micro, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    global_batch = micro * accumulation * world_size
    steps = f"{training.max_steps:,}" if training.max_steps > 0 else f"{training.num_train_epochs:g} epochs"
    return [
        f"Ranks            {world_size} = {world_size // shards} replicas x {shards} shards",
        f"  global batch   {global_batch:,} samples = {world_size} ranks x {micro} x {accumulation} micro steps",
        f"  tokens a step  up to {global_batch * config.data.cutoff_len:,} (sequence {config.data.cutoff_len:,})",
        f"  steps          {steps}",
    ]


def _data_line(sample: DataSample) -> str:
    mean = sample.tokens / sample.samples if sample.samples else 0.0
    return (
        f"Data             {sample.name}: {sample.records:,} records looked at, {sample.samples:,} samples, "
        f"{mean:,.1f} tokens each"
    )


def _memory_lines(memory: MemoryPlan, unknown: str | None) -> list[str]:
    activations = _gib(memory.activations.alone) if memory.activations else f"not known ({unknown})"
    return [
        f"Memory per rank  {_gib(memory.peak)} at the peak" + ("" if memory.activations else ", without activations"),
        f"  weights        {_gib(memory.weights)}",
        f"  gradients      {_gib(memory.gradients)}",
        f"  optimizer      {_gib(memory.optimizer)}",
        f"  gathered       {_gib(memory.gathered)}",
        f"  in flight      {_gib(memory.in_flight)}",
        f"  activations    {activations}",
        "  (the libraries and the allocator's gaps come on top)",
    ]


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 10 else f"{size / 2**20:.1f} MiB"


def _check_disk(config: Config, size: ModelSize) -> None:
    if not config.training.save_hf_weights:
        return
    dtype = config.training.hf_export_dtype
    is_whole = not config.model.has_adapters or config.training.merge_adapter
    exported = (size.total if is_whole else 0) + (size.trainable if config.model.has_adapters else 0)
    needed = exported * (DTYPES[dtype].itemsize if dtype else 4)
    folder = Path(config.training.output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"training.output_dir: {config.training.output_dir} has {_gib(free)} free, but the exported model takes up "
            f"to {_gib(needed)}; choose another folder, free some space, or set training.save_hf_weights: false"
        )
