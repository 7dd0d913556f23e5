"""A pool of gloo ranks that one test session shares.

Starting a rank costs seconds (imports of torch and transformers), so the ranks are started once and rows of work are
sent to them: a row is a function (given by its import path), its keyword arguments and a number of ranks. Every row
gets a process group of its own with exactly that many ranks, so the code under test sees the world it would see under
torchrun.

What costs more than a toy's training is done only where a test asks for it: drawing loss.png (`draw=True`), and looking
at all objects that imports have made whenever Python collects garbage.

A row that raises reports the traceback of every failing rank. A row that hangs past its time-out, or a rank that dies,
kills the pool: the error then holds the Python stack of every rank, and the next row starts a fresh pool.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

MAX_RANKS = 4
_MANY_THREADS = 30
_modules_seen = 0  # of this rank, when its objects were last set aside
_HOOK = "DistributedDataParallel._make_backward_post_hook.<locals>.hook"
_HOST = "127.0.0.1"
_DRAWING = "mindspeed_llm.observability.loss_plot.write_loss_plot"


class RowFailed(AssertionError):
    """A rank of the row raised. `errors` holds (rank, exception type name, message, traceback) of each such rank."""

    def __init__(self, message: str, errors: list[tuple[int, str, str, str]]) -> None:
        super().__init__(message)
        self.errors = errors


class RowHung(AssertionError):
    """The row did not end in time, or a rank died; the message holds every rank's stack."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One piece of work: `function` is "package.module:name", called with `arguments` on each of `ranks` ranks."""

    function: str
    arguments: dict[str, Any]
    ranks: int
    number: int
    port: int
    draw: bool


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind((_HOST, 0))
        return sock.getsockname()[1]


def _run_row(row: Row, rank: int) -> Any:
    import torch.distributed as dist

    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(row.ranks),
        "LOCAL_WORLD_SIZE": str(row.ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(row.port),
    }
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
        module, name = row.function.split(":")
        with contextlib.nullcontext() if row.draw else mock.patch(_DRAWING, _draw_nothing):
            return getattr(importlib.import_module(module), name)(**row.arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            _forget_meshes()
        if "megatron.core" in sys.modules:
            _let_models_go()
        _look_away_from_imports()
        os.environ.clear()
        os.environ.update(before)


def _forget_meshes() -> None:
    """torch remembers the layout of DTensors by their mesh, and to it meshes of the same ranks are one. What it
    remembers holds the names of the groups of the mesh that it saw first, and names are counted anew in each row: a row
    would find another one's groups, and hang where they are not its own.
    """
    import torch
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()  # type: ignore[attr-defined]
    propagator._propagate_tensor_meta_cached.cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # since torch 2.10
        torch._C._clear_DTensor_sharding_propagator_cache()


def _draw_nothing(path: Path, **curves: Any) -> None:
    """Stands for the drawing of loss.png."""


def _look_away_from_imports() -> None:
    """Half a million objects come from imports, and stay: a third of a second for each collection that sees them."""
    global _modules_seen
    if len(sys.modules) > _modules_seen:
        _modules_seen = len(sys.modules)
        gc.collect()
        gc.freeze()


def _let_models_go() -> None:
    """Each process group has threads of its own, which end with the last reference to it; models and their hooks refer
    to groups and to one another in circles.
    """
    rotary = sys.modules["megatron.core.models.common.embeddings.rotary_pos_embedding"]
    rotary.RotaryEmbedding.forward.cache_clear()  # which remembers modules, too
    gc.collect()
    if not _many_threads():
        return
    _cut_hooks()
    if not _many_threads():
        return
    gc.unfreeze()  # half a second for each rank: what an earlier row has left among the objects of imports
    _cut_hooks()
    gc.freeze()


def _many_threads() -> bool:
    return len(os.listdir("/proc/self/task")) >= _MANY_THREADS


def _cut_hooks() -> None:
    """Circles through torch's graph, which Python does not see: a chunk refers to tensors with a graph (views of an
    optimizer, probabilities of a router), they to nodes, those to hooks, and a hook to its chunk.
    """
    for thing in gc.get_objects():  # those that are frozen are not among them
        if isinstance(thing, FunctionType) and thing.__qualname__ == _HOOK:
            for cell in thing.__closure__ or ():
                with contextlib.suppress(ValueError):  # empty already
                    del cell.cell_contents
    gc.collect()


def _worker(rank: int, connection: multiprocessing.connection.Connection, stack_file: str) -> None:
    # Opened for the whole life of the process: faulthandler writes to the descriptor from a signal handler.
    stacks = open(stack_file, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            row = connection.recv()
        except EOFError:
            return
        if row is None:
            return
        try:
            answer = ("ok", _run_row(row, rank))
        except BaseException as error:
            answer = ("error", (rank, type(error).__name__, str(error), traceback.format_exc()))
        try:
            connection.send(answer)
        except Exception as error:  # the result does not pickle
            connection.send(("error", (rank, type(error).__name__, str(error), traceback.format_exc())))


class RankPool:
    """Runs rows on 1 to `size` persistent gloo ranks; see the module docstring."""

    def __init__(self, size: int = MAX_RANKS) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._connections: list[multiprocessing.connection.Connection] = []
        self._stack_files: list[Path] = []
        self._rows = 0
        self._folder = tempfile.TemporaryDirectory(prefix="rank_pool_")

    def _start(self) -> None:
        # Children read these when they import numpy and torch.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        before = {name: os.environ.get(name) for name in threads}
        os.environ.update(threads)
        context = multiprocessing.get_context("spawn")
        root = str(Path(__file__).resolve().parents[2])
        if root not in sys.path:
            sys.path.insert(0, root)
        try:
            for rank in range(self._size):
                ours, theirs = context.Pipe()
                stack_file = Path(self._folder.name) / f"stacks_{rank}.txt"
                process = context.Process(target=_worker, args=(rank, theirs, str(stack_file)), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
                self._stack_files.append(stack_file)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def run(
        self, function: str, *, ranks: int, timeout: float = 180.0, draw: bool = False, **arguments: Any
    ) -> list[Any]:
        """Call `function` ("package.module:name") on `ranks` ranks and return their results in rank order. Pictures of
        losses are drawn with `draw` alone.

        Raises:
            RowFailed: a rank raised.
            RowHung: no answer within `timeout` seconds, or a rank died; the pool starts anew with the next row.
        """
        if not 1 <= ranks <= self._size:
            raise ValueError(f"ranks must be 1..{self._size}, not {ranks}")
        if not self._processes:
            self._start()
            timeout += 60  # the first row also waits for the imports
        self._rows += 1
        row = Row(function=function, arguments=arguments, ranks=ranks, number=self._rows, port=free_port(), draw=draw)
        for connection in self._connections[:ranks]:
            connection.send(row)
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < ranks:
            waiting = {self._connections[rank]: rank for rank in range(ranks) if rank not in answers}
            left = deadline - time.monotonic()
            if any(kind == "error" for kind, _ in answers.values()):
                # The others may wait for the failed rank in a collective: give them a moment, not the whole time-out.
                left = min(left, 20.0)
                deadline = min(deadline, time.monotonic() + 20.0)
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(left, 0))
            if not ready:
                errors = [value for kind, value in answers.values() if kind == "error"]
                stacks = self._stop(collect_stacks=True)
                if errors:
                    raise RowFailed(_describe(row, errors) + "\nranks that were then still waiting:\n" + stacks, errors)
                raise RowHung(f"{function} {arguments} on {ranks} ranks: no answer within {timeout:.0f} s\n{stacks}")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=5)
                    code = self._processes[rank].exitcode
                    stacks = self._stop(collect_stacks=True)
                    raise RowHung(f"{function}: rank {rank} died (exit code {code})\n{stacks}") from None
        errors = [value for kind, value in answers.values() if kind == "error"]
        if errors:
            raise RowFailed(_describe(row, errors), errors)
        return [answers[rank][1] for rank in range(ranks)]

    def _stop(self, *, collect_stacks: bool) -> str:
        texts = []
        if collect_stacks:
            for process in self._processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            texts = [f"--- rank {rank}\n{path.read_text()}" for rank, path in enumerate(self._stack_files)]
        for process in self._processes:
            process.kill()
            process.join(timeout=10)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._stack_files = [], [], []
        return "\n".join(texts)

    def close(self) -> None:
        """End the ranks and remove the pool's files."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            if process.is_alive():
                connection.send(None)
        for process in self._processes:
            process.join(timeout=5)
        self._stop(collect_stacks=False)
        self._folder.cleanup()


def _describe(row: Row, errors: list[tuple[int, str, str, str]]) -> str:
    parts = [f"{row.function} {row.arguments} on {row.ranks} ranks:"]
    parts += [f"--- rank {rank}: {kind}: {message}\n{trace}" for rank, kind, message, trace in errors]
    return "\n".join(parts)
