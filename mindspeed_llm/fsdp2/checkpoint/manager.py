"""Writing and reading the checkpoints of a run."""

from __future__ import annotations

import io
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_llm.fsdp2.checkpoint import manifest as layout
from mindspeed_llm.fsdp2.checkpoint.manifest import Manifest
from mindspeed_llm.fsdp2.checkpoint.safe_reader import load_plain, read_metadata, tensor_entries
from mindspeed_llm.fsdp2.checkpoint.storage import CheckpointError, Storage, open_storage
from mindspeed_llm.fsdp2.checkpoint.tensor_files import read_tensors, write_bytes, write_tensors
from mindspeed_llm.fsdp2.checkpoint.train_state import (
    check_entries,
    make_optimizer_tensors,
    model_tensors,
    optimizer_tensors,
)
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.platform import distributed

logger = get_logger(__name__)

_REPLACED = f".replaced{layout.TEMPORARY_SUFFIX}"
_REMOVED = f".removed{layout.TEMPORARY_SUFFIX}"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a manifest says about the run besides its state: see `Manifest`."""

    topology: dict[str, int]
    versions: dict[str, str]
    config: dict[str, Any]


@dataclass(kw_only=True)
class _Job:
    """A checkpoint on its way to the disk."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    rank_state: Mapping[str, Any]
    progress: dict[str, Any]
    has_optimizer: bool
    thread: threading.Thread | None = None
    error: BaseException | None = None


class CheckpointManager:
    """Saves and loads; every rank holds one and calls it at the same steps.

    A checkpoint is written into a temporary directory, hashed, described in a manifest and published by renaming the
    directory; a failure at any point leaves the older checkpoints as they are. With `asynchronous`, `save` returns
    after copying the tensors, and a thread writes; the next `save` waits for the one before.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        facts: RunFacts,
        total_limit: int | None,
        only_model: bool,
        asynchronous: bool,
    ) -> None:
        """Raises CheckpointError when the folder cannot be written."""
        self._output_dir = output_dir
        self._folder = layout.checkpoints_folder(output_dir)
        self._facts = facts
        self._total_limit = total_limit if total_limit and total_limit > 0 else None
        self._only_model, self._asynchronous = only_model, asynchronous
        self._storage: Storage = open_storage(self._folder)
        self._job: _Job | None = None
        self._storage.leaders_only("removing unfinished checkpoints", self._remove_unfinished)

    @property
    def failed(self) -> bool:
        """Whether the save in the background has ended with an error that `wait` will raise; does not block."""
        job = self._job
        return job is not None and job.error is not None and (job.thread is None or not job.thread.is_alive())

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        rank_state: Mapping[str, Any],
        progress: dict[str, Any],
    ) -> None:
        """Save after optimizer step `step` (a collective).

        Args:
            rank_state: this rank's random state; plain values and tensors.
            progress: where training stands; plain values, the same on every rank.

        Raises:
            CheckpointError: on all ranks, for this save, or with `asynchronous` for the one before.
        """
        self.wait()
        tensors = model_tensors(model)
        if not self._only_model:
            tensors |= optimizer_tensors(model, optimizer)
        if self._asynchronous:
            tensors = {name: _host_copy(tensor) for name, tensor in tensors.items()}
        job = _Job(
            step=step,
            tensors=tensors,
            rank_state=rank_state,
            progress=progress,
            has_optimizer=not self._only_model,
        )
        if not self._asynchronous:
            self._write(job)
            return
        job.thread = threading.Thread(target=self._write_in_background, args=(job,), name="checkpoint", daemon=True)
        self._job = job
        job.thread.start()

    def wait(self) -> None:
        """Wait for the save in the background, if there is one (a collective in so far as all ranks must call it).

        Raises:
            CheckpointError: it failed.
        """
        job, self._job = self._job, None
        if job is None or job.thread is None:
            return
        job.thread.join()
        if job.error is not None:
            raise job.error

    def load(
        self, folder: Path, manifest: Manifest, *, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any] | None:
        """Load a checkpoint that was checked into the model and optimizer (a collective).

        Returns this rank's random state, or None where the checkpoint has none for it (another number of ranks).

        Raises:
            CheckpointError: it belongs to another model, or holds more than tensors.
        """
        what = f"loading {folder}"
        tensors = self._storage.together(what, lambda: self._tensors_to_load(folder, manifest, model, optimizer))
        read_tensors(tensors, folder, self._storage)
        path = folder / layout.EXTRA_STATE / f"extra_state_rank_{distributed.rank()}.pt"
        same_ranks = manifest.topology["ranks"] == distributed.world_size()
        has_state = same_ranks and manifest.has_optimizer
        return self._storage.together(what, lambda: load_plain(path) if has_state else None)

    def choose(self, wanted: str) -> tuple[Path, Manifest] | None:
        """The checkpoint to resume from (a collective): `latest`, or a directory.

        `latest` is the newest one whose files are all as they were written; those passed over are reported with the
        file. None when there is none at all.

        Raises:
            CheckpointError: the named directory is no checkpoint or damaged, or all checkpoints are damaged.
        """
        if wanted != "latest":
            folder = Path(wanted)
            manifest, problem = self._check(folder)
            if problem is not None:
                raise CheckpointError(f"training.resume_from_checkpoint: {problem}")
            return folder, manifest
        candidates = layout.find_checkpoints(self._output_dir) if distributed.rank() == 0 else []
        steps = self._storage.gather([step for step, _ in candidates])[0]
        passed_over = []
        for step in reversed(steps):
            folder = self._folder / layout.step_name(step)
            manifest, problem = self._check(folder)
            if problem is None:
                return folder, manifest
            passed_over.append(problem)
            logger.warning("skipped the damaged checkpoint %s: %s", folder, problem)
        if passed_over:
            raise CheckpointError(
                f"training.resume_from_checkpoint: latest, but every checkpoint of {self._folder} is damaged: "
                + "; ".join(passed_over)
            )
        return None

    # --- checking

    def _check(self, folder: Path) -> tuple[Manifest, str | None]:
        """Each rank hashes its part of the files; all agree on the first problem."""
        manifest, problem = None, None
        try:
            manifest = layout.read_manifest(folder)
            layout.check_files(folder, manifest, self._my_share(manifest))
        except layout.DamagedCheckpoint as damage:
            problem = str(damage)
        problems = [text for text in self._storage.gather(problem) if text is not None]
        return manifest, problems[0] if problems else None  # type: ignore[return-value]

    def _my_share(self, manifest: Manifest) -> list[str]:
        names = sorted(manifest.files)
        if self._storage.shared:
            return names[distributed.rank() :: distributed.world_size()]
        return names if self._storage.is_leader else []

    # --- writing

    def _write_in_background(self, job: _Job) -> None:
        try:
            self._write(job)
        except BaseException as error:
            # Handed to the training thread by `wait`; nobody could catch it here.
            job.error = error
        finally:
            job.tensors = {}  # free the copies

    def _write(self, job: _Job) -> None:
        storage, started = self._storage, time.monotonic()
        final = self._folder / layout.step_name(job.step)
        temporary = final.with_name(final.name + layout.TEMPORARY_SUFFIX)
        try:
            storage.leaders_only(f"making {temporary}", lambda: _fresh_folder(temporary))
            write_tensors(job.tensors, temporary, storage)
            storage.together(f"writing to {temporary}", lambda: self._write_rank_state(job, temporary))
            described = storage.together(f"reading back {temporary}", lambda: self._describe_my_files(temporary))
            everyone = storage.gather(described)
            storage.leaders_only(f"publishing {final}", lambda: self._publish(job, temporary, final, everyone))
        except CheckpointError:
            if storage.is_leader:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        storage.leaders_only("removing old checkpoints", lambda: self._remove_old(job.step))
        size = sum(entry["size"] for part in everyone for entry in part.values())
        logger.info("Saved checkpoint %s (%.2f GiB in %.1f s)", final, size / 2**30, time.monotonic() - started)

    def _write_rank_state(self, job: _Job, folder: Path) -> None:
        path = folder / layout.EXTRA_STATE / f"extra_state_rank_{distributed.rank()}.pt"
        path.parent.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        torch.save(dict(job.rank_state), buffer)
        write_bytes(path, buffer.getvalue())

    def _describe_my_files(self, folder: Path) -> dict[str, dict[str, Any]]:
        rank = distributed.rank()
        names = [f"{layout.EXTRA_STATE}/extra_state_rank_{rank}.pt"]
        names += [path.name for path in folder.glob(f"__{rank}_*.distcp")]
        if rank == 0 or (self._storage.is_leader and not self._storage.shared):
            names.append(layout.METADATA)
        return {name: layout.describe_file(folder / name) for name in names}

    def _publish(self, job: _Job, temporary: Path, final: Path, described: list[dict[str, dict[str, Any]]]) -> None:
        nodes, mine = self._storage.nodes, self._storage.nodes[distributed.rank()]
        here = [part for node, part in zip(nodes, described, strict=True) if self._storage.shared or node == mine]
        files = {name: entry for part in here for name, entry in part.items()}
        layout.write_manifest(
            temporary,
            Manifest(
                step=job.step,
                has_optimizer=job.has_optimizer,
                files=files,
                topology=self._facts.topology,
                progress=job.progress,
                versions=self._facts.versions,
                config=self._facts.config,
            ),
        )
        layout.sync_folder(temporary / layout.EXTRA_STATE)
        layout.sync_folder(temporary)
        if final.exists():
            # A resumed run that passes this step again: the new one replaces the old one in two renames.
            outdated = final.with_name(final.name + _REPLACED)
            shutil.rmtree(outdated, ignore_errors=True)
            os.rename(final, outdated)
            os.rename(temporary, final)
            shutil.rmtree(outdated, ignore_errors=True)
        else:
            os.rename(temporary, final)
        layout.sync_folder(self._folder)
        layout.write_durably(self._folder / layout.LATEST, final.name + "\n")

    def _remove_old(self, newest: int) -> None:
        if self._total_limit is None:
            return
        # Checkpoints of later steps come from an earlier attempt of this run; the newest is never one of the victims.
        others = [(step, path) for step, path in layout.find_checkpoints(self._output_dir) if step != newest]
        for _, path in others[: max(len(others) - (self._total_limit - 1), 0)]:
            _remove_folder(path)

    def _remove_unfinished(self) -> None:
        for path in [
            *self._folder.glob(f".{layout.LATEST}.*{layout.TEMPORARY_SUFFIX}"),
            *self._folder.glob(".shared_*"),
        ]:
            path.unlink(missing_ok=True)
        for path in self._folder.glob(f"global_step_*{_REPLACED}"):
            # Killed between the two renames of a replacement: the old checkpoint is whole and takes its place again.
            final = path.with_name(path.name.removesuffix(_REPLACED))
            if not final.exists():
                os.rename(path, final)
        for path in self._folder.glob(f"global_step_*{layout.TEMPORARY_SUFFIX}"):
            logger.info("removed the unfinished checkpoint %s", path)
            _remove_folder(path)

    # --- reading

    def _tensors_to_load(
        self, folder: Path, manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, torch.Tensor]:
        entries = tensor_entries(read_metadata(folder), folder)
        tensors = model_tensors(model)
        if manifest.has_optimizer:
            make_optimizer_tensors(model, optimizer, entries)
            tensors |= optimizer_tensors(model, optimizer)
        check_entries(tensors, entries, str(folder))
        return tensors


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory with the same sharding (the mesh of a DTensor stays the device's; only its shard moves)."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return DTensor(tensor.to_local().to("cpu", copy=True), tensor._spec, requires_grad=False)
    return tensor.to("cpu", copy=True)


def _fresh_folder(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def _remove_folder(path: Path) -> None:
    """Remove a checkpoint so that a crash in between leaves no directory under its final name with files missing."""
    doomed = path
    if not path.name.endswith(layout.TEMPORARY_SUFFIX):
        doomed = path.with_name(path.name + _REMOVED)
        os.rename(path, doomed)
    shutil.rmtree(doomed)
