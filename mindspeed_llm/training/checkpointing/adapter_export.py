"""`--save-lora-to-hf`: a run's adapters in PEFT's files, with each checkpoint.

    <save>/iter_0000010/hf_adapter/     adapter_config.json, adapter_model.safetensors
    <hf-save-dir>/iter_0000010/         the same and conversion_report.json, with --hf-save-dir

They are converted by `tasks.checkpoint`, as `convert_ckpt_v2.py` converts the checkpoint, but from memory: rank 0 gets
the adapters of all ranks, whatever the format of the checkpoint is.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_llm.checkpoints.files import describe_file
from mindspeed_llm.checkpoints.storage import Storage, open_storage_for_reading
from mindspeed_llm.platform import distributed
from mindspeed_llm.tasks.checkpoint.adapter_reader import adapter_key
from mindspeed_llm.tasks.checkpoint.convert import convert
from mindspeed_llm.tasks.checkpoint.in_memory import HeldDirectory
from mindspeed_llm.tasks.checkpoint.prepare import prepare
from mindspeed_llm.tasks.checkpoint.report import REPORT
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from mindspeed_llm.training.checkpointing.layout import HF_ADAPTER, iteration_name
from mindspeed_llm.training.checkpointing.rank_files import chunk_name, own_folder
from mindspeed_llm.training.checkpointing.saved_args import plain_args
from mindspeed_llm.training.folders import export_config, in_words_of
from mindspeed_llm.training.setup import TrainingModel

_Models = dict[str, dict[str, Tensor]]
"""Chunk -> key -> values."""


def check_export(args: Namespace, model: TrainingModel) -> None:
    """Make the plan of what `write_adapters` will write, from shapes alone (a collective).

    Raises:
        UserError: on all ranks; PEFT's files cannot hold the adapters, or the Hugging Face configuration is of another
            model.
    """
    folder = Path(args.save)
    assert dist.group.WORLD is not None
    storage = open_storage_for_reading(folder, dist.group.WORLD)
    checkpoint = folder / iteration_name(0)
    held = _gathered(args, model, storage, checkpoint, lambda values: values.to("meta"))

    def plan() -> None:
        if held is not None:
            with in_words_of(_words(args)):
                prepare(_request(args, checkpoint, _target(args, checkpoint, checkpoint)), held)

    storage.together("planning the files of --save-lora-to-hf", plan)


def write_adapters(
    args: Namespace, model: TrainingModel, storage: Storage, *, checkpoint: Path, written_in: Path
) -> dict[str, dict[str, Any]]:
    """Write the adapters (a collective); all is on the disk afterwards. Returns the files in the checkpoint that this
    rank wrote, with size and hash: none with --hf-save-dir.

    Args:
        checkpoint: the folder that the checkpoint will have.
        written_in: the one that it is written in.

    Raises:
        UserError, CheckpointError: on all ranks; it cannot be done, and nothing of it is left.
    """
    held = _gathered(args, model, storage, checkpoint, lambda values: values.cpu())
    target = _target(args, checkpoint, written_in)

    def write() -> dict[str, dict[str, Any]]:
        if held is None:
            return {}
        with in_words_of(_words(args)):
            convert(_request(args, checkpoint, target), held=held)
        if args.hf_save_dir is not None:
            return {}
        # It names the folder that the checkpoint was written in; of these files the manifest tells the same.
        (target / REPORT).unlink()
        return {f"{target.name}/{path.name}": describe_file(path) for path in sorted(target.iterdir())}

    return storage.together(f"writing the adapters of {checkpoint} for PEFT", write)


def _target(args: Namespace, checkpoint: Path, written_in: Path) -> Path:
    return written_in / HF_ADAPTER if args.hf_save_dir is None else Path(args.hf_save_dir) / checkpoint.name


def _request(args: Namespace, checkpoint: Path, target: Path) -> ConversionRequest:
    return ConversionRequest(
        load_model_type="mg",
        save_model_type="hf",
        load_dir=checkpoint,
        save_dir=target,
        model_type_hf=args.model_type_hf,
        hf_cfg_dir=export_config(args),
        save_lora_to_hf=True,
        # A run that went back to an earlier step comes to the same step again.
        overwrite=args.hf_save_dir is not None,
    )


def _words(args: Namespace) -> dict[str, str]:
    return {"--load-dir": "--save", "--save-dir": "--save" if args.hf_save_dir is None else "--hf-save-dir"}


def _gathered(
    args: Namespace, model: TrainingModel, storage: Storage, checkpoint: Path, taken: Callable[[Tensor], Tensor]
) -> HeldDirectory | None:
    """The adapters of all ranks on rank 0, each of a model's parts once; None on the others (a collective)."""
    modules, name = model.modules, own_folder(args)
    mine: _Models = {
        chunk_name(index, len(modules)): {
            key: taken(values.detach()) for key, values in module.named_parameters() if adapter_key(key) is not None
        }
        for index, module in enumerate(modules)
    }
    names = storage.gather(name)
    senders = {name: names.index(name) for name in names}
    rank, host = distributed.rank(), torch.device("cpu")
    if rank != 0:
        if senders[name] == rank:
            dist.send_object_list([mine], dst=0, group=storage.group, device=host)
        return None
    found = {names[0]: mine}
    for other, sender in senders.items():
        if sender != 0:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=sender, group=storage.group, device=host)
            found[other] = received[0]
    return HeldDirectory(checkpoint, vars(plain_args(args)), found)
