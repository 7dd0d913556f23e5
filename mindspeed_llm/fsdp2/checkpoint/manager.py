"""Writing and reading the checkpoints of a run."""

from __future__ import annotations

import io
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

from mindspeed_llm.checkpoints.dcp_reader import load_plain, read_metadata, tensor_entries
from mindspeed_llm.checkpoints.storage import CheckpointError, Storage, open_storage
from mindspeed_llm.files import sync_folder, write_durably
from mindspeed_llm.fsdp2.checkpoint import manifest as layout
from mindspeed_llm.fsdp2.checkpoint import retention
from mindspeed_llm.fsdp2.checkpoint.manifest import Manifest
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


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a manifest says about the run besides its state: see `Manifest`."""

    topology: dict[str, int]
    versions: dict[str, str]
    config: dict[str, Any]
    adapter: dict[str, Any] | None = None


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
        export_file: str = "config.json",
    ) -> None:
        """`export_file` is what the export of the trained model writes last.

        Raises CheckpointError when the folder cannot be written.
        """
        self._export_file = export_file
        self._output_dir = output_dir
        self._folder = layout.checkpoints_folder(output_dir)
        self._facts = facts
        self._total_limit = total_limit if total_limit and total_limit > 0 else None
        self._only_model, self._asynchronous = only_model, asynchronous
        self._exports = layout.exports_folder(output_dir)
        self._storage: Storage = open_storage(self._folder)
        self._job: _Job | None = None
        # What belongs to this run's line of training: steps up to where it goes on, and what it has written since.
        # None: not said (yet), all belongs.
        self._goes_on_from: int | None = None
        self._written: set[int] = set()
        self._exported: set[int] = set()
        # The checkpoint whose weights alone this run started from; it stays until there is another.
        self._source: int | None = None
        self._storage.leaders_only("removing unfinished checkpoints", self._put_in_order)

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
        # The export of this step comes afterwards: what has its name now is an earlier one.
        self._storage.leaders_only("setting earlier exports aside", self._set_exports_aside)
        self._exported.add(step)
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
            UserError: it belongs to another model.
            CheckpointError: it cannot be read, or holds more than tensors.
        """
        what = f"loading {folder}"
        tensors = self._storage.together(what, lambda: self._tensors_to_load(folder, manifest, model, optimizer))
        read_tensors(tensors, folder, self._storage)
        path = folder / layout.EXTRA_STATE / f"extra_state_rank_{distributed.rank()}.pt"
        same_ranks = manifest.topology["ranks"] == distributed.world_size()
        has_state = same_ranks and manifest.has_optimizer
        return self._storage.together(what, lambda: _load_state(path) if has_state else None)

    def begin(self, chosen: tuple[Path, Manifest] | None) -> None:
        """Say what this run goes on from, before it trains (a collective): what `choose` gave.

        Without a checkpoint, or with one that lies elsewhere, all checkpoints and exports of the output folder are of
        another run and are set aside now; those of another line of training when the first of this one is published.

        Raises:
            CheckpointError: they cannot be moved.
        """
        self._goes_on_from = -1
        if chosen is None or not self.is_own(chosen[0]):
            self._storage.leaders_only(
                "setting earlier checkpoints aside", lambda: retention.set_aside_all(self._output_dir)
            )
        elif chosen[1].has_optimizer:
            self._goes_on_from = chosen[1].step
        else:
            self._source = chosen[1].step

    def is_own(self, checkpoint: Path) -> bool:
        """Whether a checkpoint lies in the folder that this run saves to."""
        return checkpoint.resolve().parent == self._folder.resolve()

    def is_export_missing(self, checkpoint: Path) -> bool:
        """Whether the output folder lacks the model of `checkpoint`, which was written after the last step of a run (a
        collective): it lies elsewhere, or the run ended before its export did.
        """

        def is_there() -> bool:
            # The export is of the run's last step: of an earlier checkpoint it is another model.
            newest = self.newest()
            if newest is None or newest.resolve() != checkpoint.resolve():
                return False
            export, saved = self._output_dir / self._export_file, checkpoint / layout.FILE_NAME
            return export.exists() and export.stat().st_mtime >= saved.stat().st_mtime

        return not self._storage.gather(is_there())[0]

    def newest(self) -> Path | None:
        """The newest checkpoint of the output folder, or None."""
        found = layout.find_checkpoints(self._output_dir)
        return found[-1][1] if found else None

    def remove_old_exports(self, newest: int) -> None:
        """Keep `total_limit` of the exports that are made at checkpoints; `newest` was made just now. On the rank that
        writes them; no collective. A failure is reported only.
        """
        try:
            retention.remove_oldest(self._exports, self._total_limit, newest=newest)
        except OSError as error:
            logger.warning("an old export in %s cannot be removed: %s", self._exports, error)

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
        storage.leaders_only(
            "removing old checkpoints",
            lambda: retention.remove_oldest(self._folder, self._total_limit, newest=job.step),
        )
        size = sum(entry["size"] for part in everyone for entry in part.values())
        logger.info("Saved checkpoint %s (%s in %.1f s)", final, layout.size_text(size), time.monotonic() - started)

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
                adapter=self._facts.adapter,
            ),
        )
        sync_folder(temporary / layout.EXTRA_STATE)
        sync_folder(temporary)
        # Before the new one is there, so that `latest` is at no moment a checkpoint of another line.
        others = [step for step in self._foreign_steps(self._folder, self._written) if step != self._source]
        retention.set_aside_steps(self._folder, others)
        retention.replace(self._folder, final.name, temporary)
        write_durably(self._folder / layout.LATEST, final.name + "\n")
        self._written.add(job.step)
        self._source = None
        retention.set_aside_steps(self._folder, self._foreign_steps(self._folder, self._written))

    def _foreign_steps(self, folder: Path, mine: set[int]) -> list[int]:
        """Steps in a folder that belong to another line of training than this run's."""
        kept = self._goes_on_from
        if kept is None:
            return []
        return [step for step, _ in layout.steps_in(folder) if step > kept and step not in mine]

    def _set_exports_aside(self) -> None:
        retention.set_aside_steps(self._exports, self._foreign_steps(self._exports, self._exported))

    def _put_in_order(self) -> None:
        for folder in (self._folder, self._exports):
            retention.finish_interrupted(folder)

    # --- reading

    def _tensors_to_load(
        self, folder: Path, manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, torch.Tensor]:
        entries = tensor_entries(read_metadata(folder), folder)
        tensors = model_tensors(model)
        if manifest.has_optimizer:
            make_optimizer_tensors(model, optimizer, entries)
            tensors |= optimizer_tensors(model, optimizer)
        check_entries(
            tensors,
            entries,
            source=f"training.resume_from_checkpoint: {folder}",
            advice="resume with the model and the optimizer that wrote it, or start anew with another "
            "training.output_dir and without resume_from_checkpoint",
        )
        return tensors


def _load_state(path: Path) -> dict[str, Any]:
    state = load_plain(path)
    if not isinstance(state, dict) or "rng" not in state:
        raise layout.DamagedCheckpoint(f"{path} holds no random state")
    return state


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
