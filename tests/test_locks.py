"""The lock between processes; what two runs do with it is tested where they use it."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mindspeed_llm.locks import FileLock, LockIsHeld


def _hold_with_a_child(path: Path, connection: Connection) -> None:
    lock = FileLock(path, without_locks="")
    lock.take("a note")
    child = os.fork()
    if child == 0:
        signal.pause()
    connection.send(child)
    signal.pause()


def test_it_ends_with_the_process_even_where_a_forked_worker_lives_on(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_hold_with_a_child, args=(tmp_path / "lock", there))
    process.start()
    child = here.recv()
    try:
        lock = FileLock(tmp_path / "lock", without_locks="")
        with pytest.raises(LockIsHeld) as held:
            lock.take()
        assert held.value.holder.startswith(f"process {process.pid} on {socket.gethostname()} since 2")
        assert held.value.note == "a note"
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        os.kill(child, 0)  # still there
        lock.take()
        lock.remove()
        lock.release()
        assert list(tmp_path.iterdir()) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(logging.getLogger("mindspeed_llm"), "propagate", True)
    lock = FileLock(tmp_path / "lock", without_locks="take care")
    lock.take()
    lock.release()
    # A record that other tests' handlers pass on as well is seen twice.
    assert {record.getMessage() for record in caplog.records} == {
        f"no locks in {tmp_path} (No locks available): take care"
    }


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "nowhere" / "lock", without_locks="").take()
