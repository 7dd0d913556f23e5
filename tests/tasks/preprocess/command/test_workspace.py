"""One run at a time works on a prefix, and nothing stays when it ends."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.workspace import Workspace, write_json


def _hold(prefix: Path, connection: Connection) -> None:
    with Workspace(prefix) as workspace:
        workspace.begin({"what": "first"})
        (workspace.folder / "part").mkdir()
        connection.send(os.getpid())
        connection.recv()


def test_two_runs_and_a_killed_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    prefix = tmp_path / "new folder" / "data"
    process = context.Process(target=_hold, args=(prefix, there))
    process.start()
    pid = here.recv()
    with pytest.raises(UserError, match=rf"another run is writing it \(process {pid} on "), Workspace(prefix):
        pass
    with Workspace(tmp_path / "new folder" / "data2"):
        pass
    os.kill(pid, signal.SIGKILL)
    process.join()
    with Workspace(prefix) as workspace:
        assert workspace.note() == {"what": "first"} and (workspace.folder / "part").is_dir()
        workspace.begin({"what": "second"})
        assert sorted(path.name for path in workspace.folder.iterdir()) == ["lock", "work.json"]
    assert list(prefix.parent.iterdir()) == []


def test_what_is_kept(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Workspace(tmp_path / "data") as workspace:
        workspace.begin({"number": 1})
        write_json(workspace.folder / "x.json", {"y": 2})
        workspace.keep = True
        raise KeyError
    with Workspace(tmp_path / "data") as workspace:
        assert workspace.note() == {"number": 1} and (workspace.folder / "x.json").is_file()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_note_counts_as_none(tmp_path: Path) -> None:
    with Workspace(tmp_path / "data") as workspace:
        assert workspace.note() == {}
        (workspace.folder / "work.json").write_text('{"number": ')
        assert workspace.note() == {}
