"""Saving a run of the Megatron backend: written to a temporary name, checked, and published as a whole."""

from __future__ import annotations

import contextlib
import platform
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_llm.checkpoints.files import size_text
from mindspeed_llm.checkpoints.storage import CheckpointError, Storage, open_storage
from mindspeed_llm.core.shared_master import masters_in_fp32
from mindspeed_llm.errors import UserError
from mindspeed_llm.files import TEMPORARY_SUFFIX, sync_folder
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.platform import distributed
from mindspeed_llm.training.checkpointing import (
    adapter_export,
    optimizer_state,
    publishing,
    rank_files,
    sharded_writing,
)
from mindspeed_llm.training.checkpointing.content import common_content
from mindspeed_llm.training.checkpointing.layout import TORCH_DIST, iteration_name
from mindspeed_llm.training.checkpointing.lock import locked
from mindspeed_llm.training.checkpointing.manifest import Manifest, write_manifest
from mindspeed_llm.training.setup import TrainingModel
from mindspeed_llm.training.state import TrainState

logger = get_logger(__name__)
_PACKAGES = ("mindspeed_llm", "torch", "megatron-core")


def save_checkpoint(args: Namespace, model: TrainingModel, state: TrainState) -> None:
    """Save after `state.iteration` steps in `args.save` (a collective).

    Checkpoints there that belong to another line of training than this run's are set aside, see `publishing`.
    `state.last_checkpoint` says afterwards that this one is the run's.

    Raises:
        UserError: on all ranks; the folder cannot be used in this way.
        CheckpointError: on all ranks, with the first failing rank's cause. Nothing has been published then.
            Where only the adapters of `--save-lora-to-hf` cannot be written, the checkpoint is there without them.
    """
    started, folder = time.monotonic(), Path(args.save)
    assert dist.group.WORLD is not None
    storage = open_storage(folder, dist.group.WORLD)
    final = folder / iteration_name(state.iteration)
    temporary = final.with_name(final.name + TEMPORARY_SUFFIX)
    with locked(folder, storage), _parameters_gathered(model), masters_in_fp32(model.optimizer):
        storage.leaders_only(f"putting {folder} in order", lambda: publishing.finish_interrupted(folder))
        try:
            storage.leaders_only(f"making {temporary}", temporary.mkdir)
            optimizer_state.allocate(model.optimizer)
            # A stage without anything to train counts no steps.
            steps = storage.gather(optimizer_state.steps_done(model.optimizer))
            common = common_content(
                args,
                state,
                optimizer_kind=optimizer_state.kind(model.optimizer),
                steps=max((count for count in steps if count is not None), default=None),
            )
            write = sharded_writing.write if args.ckpt_format == TORCH_DIST else rank_files.write
            written = write(temporary, args, model, common, storage)
            # A checkpoint must not be lost for what is beside it.
            failure, adapters = _adapters(args, model, storage, final, temporary)
            everyone = storage.gather(written | adapters)
            storage.leaders_only(
                f"publishing {final}", lambda: _publish(args, state, temporary, _files_here(everyone, storage))
            )
        except (CheckpointError, UserError):
            if storage.is_leader:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    state.last_checkpoint = state.iteration
    size = sum(entry["size"] for part in everyone for entry in part.values())
    logger.info("Saved checkpoint %s (%s in %.1f s)", final, size_text(size), time.monotonic() - started)
    if failure is not None:
        raise failure


def _adapters(
    args: Namespace, model: TrainingModel, storage: Storage, checkpoint: Path, written_in: Path
) -> tuple[UserError | CheckpointError | None, dict[str, dict[str, Any]]]:
    """Write the adapters for PEFT where that is wanted: why it failed, and the files in the checkpoint."""
    if not args.save_lora_to_hf:
        return None, {}
    try:
        files = adapter_export.write_adapters(args, model, storage, checkpoint=checkpoint, written_in=written_in)
    except (UserError, CheckpointError) as error:
        return error, {}
    return None, files


def _files_here(everyone: list[dict[str, Any]], storage: Storage) -> dict[str, Any]:
    """The files that lie in this rank's folder, of those that all ranks have written."""
    mine = storage.nodes[distributed.rank()]
    parts = [part for node, part in zip(storage.nodes, everyone, strict=True) if storage.shared or node == mine]
    return {name: entry for part in parts for name, entry in part.items()}


def _publish(args: Namespace, state: TrainState, temporary: Path, files: dict[str, Any]) -> None:
    write_manifest(
        temporary,
        Manifest(
            iteration=state.iteration,
            ckpt_format=args.ckpt_format,
            files=files,
            ranks=distributed.world_size(),
            versions=_versions(),
        ),
    )
    for path in temporary.iterdir():
        if path.is_dir():
            sync_folder(path)
    sync_folder(temporary)
    publishing.publish(Path(args.save), state.iteration, temporary, last=state.last_checkpoint)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextlib.contextmanager
def _parameters_gathered(model: TrainingModel) -> Iterator[None]:
    """Within this context all parameters are those after the last step: with --overlap-param-gather they would only
    come with the next forward pass.
    """
    overlapping = [chunk for chunk in model.chunks if chunk.ddp_config.overlap_param_gather]
    for chunk in overlapping:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in overlapping:
            chunk.enable_forward_pre_hook()
