"""The table of a run's checkpoints, on directories made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.listing import list_checkpoints
from mindspeed_llm.fsdp2.checkpoint.manifest import Manifest, describe_file, write_manifest
from mindspeed_llm.fsdp2.main import main


def make(output: Path, step: int, *, model_only: bool = False, replicas: int = 1, suffix: str = "") -> Path:
    """A checkpoint of two files of 3 MiB and 5 bytes."""
    folder = output / "checkpoints" / f"global_step_{step}{suffix}"
    (folder / "extra_state").mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(3 << 20))
    (folder / "extra_state" / "extra_state_rank_0.pt").write_bytes(b"state")
    names = ["__0_0.distcp", "extra_state/extra_state_rank_0.pt"]
    manifest = Manifest(
        step=step,
        has_optimizer=not model_only,
        files={name: describe_file(folder / name) for name in names},
        topology={"ranks": 4, "replicas": replicas, "shards": 4 // replicas, "micro_batch_size": 1, "accumulation": 1},
        progress={},
        versions={},
        config={},
    )
    write_manifest(folder, manifest)
    return folder


def listed(output: Path) -> list[str]:
    """The rows and what stands below them, without the name of the folder and the headings."""
    lines: list[str] = []
    list_checkpoints(output, show=lines.append)
    first = lines[0].splitlines()
    assert first[0] == str(output / "checkpoints")
    assert first[1].split() == ["step", "size", "age", "ranks", "contents", "state"]
    return lines[1:]


def test_a_row_says_everything(tmp_path: Path) -> None:
    make(tmp_path, 5, model_only=True)
    whole = make(tmp_path, 10, replicas=2)
    (whole / "hf_ckpt").mkdir()
    (whole / "hf_ckpt" / "model.safetensors").write_bytes(bytes(9 << 20))  # no part of the checkpoint
    (tmp_path / "checkpoints" / "latest").write_text("global_step_10\n")
    os.utime(whole / "manifest.json", times=(time.time() - 3 * 3600,) * 2)
    newest, oldest = listed(tmp_path)
    assert " ".join(newest.split()) == "10 3.00 MiB 3.0 h 4 (2 x 2) model, optimizer whole, latest"
    assert oldest.split()[:3] == ["5", "3.00", "MiB"]
    assert oldest.split()[4:] == ["s", "4", "model", "only", "whole"]


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda path: path.write_bytes(b""), "__0_0.distcp has 0 bytes instead of 3145728"),
        (
            lambda path: path.write_bytes(bytes((3 << 20) - 1) + b"\1"),
            "__0_0.distcp has other content than was written",
        ),
        (lambda path: path.unlink(), "__0_0.distcp is missing"),
        (lambda path: (path.unlink(), path.mkdir()), "__0_0.distcp is a directory, expected a file"),
        (lambda path: (path.parent / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path.parent / "manifest.json").write_text("{"), "manifest.json has other content"),
    ],
    ids=["emptied", "bit flipped", "removed", "a directory", "manifest removed", "manifest cut"],
)
def test_damage_names_the_file_and_latest_is_the_one_before(
    tmp_path: Path, harm: Callable[[Path], object], problem: str
) -> None:
    make(tmp_path, 10)
    damaged = make(tmp_path, 20)
    (tmp_path / "checkpoints" / "latest").write_text("global_step_20\n")
    harm(damaged / "__0_0.distcp")
    newest, before, note = listed(tmp_path)
    assert f"damaged: {damaged}/" in newest and problem in newest
    assert before.endswith("whole, latest")
    assert note.endswith(
        "latest names global_step_20, but resuming from latest takes global_step_10, the newest whole one"
    )


def test_nothing_whole(tmp_path: Path) -> None:
    (make(tmp_path, 10) / "__0_0.distcp").unlink()
    (tmp_path / "checkpoints" / "latest").write_text("global_step_10\n")
    assert listed(tmp_path)[-1].endswith("resuming from latest is not possible: no checkpoint is whole")


def test_unfinished_directories_are_never_latest(tmp_path: Path) -> None:
    make(tmp_path, 10)
    make(tmp_path, 30, suffix=".tmp")
    make(tmp_path, 7, suffix=".removed.tmp")
    (tmp_path / "checkpoints" / "global_step_x").mkdir()
    whole, *others = listed(tmp_path)
    assert whole.endswith("whole, latest")
    assert [line.split()[0] for line in others] == ["7", "30"]
    assert others[1].endswith("unfinished or being written: global_step_30.tmp")


def test_what_is_set_aside(tmp_path: Path) -> None:
    for step in (5, 10):
        make(tmp_path, step)
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints.2")
    make(tmp_path, 3)
    whole, line = listed(tmp_path)
    assert whole.endswith("whole, latest") and line == f"set aside: {tmp_path / 'checkpoints.2'} with 5, 10"


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert listed(tmp_path) == ["(none)"]


def test_wrong_folders(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path / "nowhere", "nowhere does not exist"),
        (tmp_path, "has no folder checkpoints: no checkpoint has been written there"),
    ):
        with pytest.raises(UserError, match=message):
            list_checkpoints(folder)
    checkpoint = make(tmp_path, 10)
    for folder in (checkpoint, checkpoint.parent):
        with pytest.raises(UserError, match=f"lies inside of the output folder of a run; give {tmp_path}$"):
            list_checkpoints(folder)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--list-checkpoints"], "needs the output folder"),
        (["--list-checkpoints="], "needs the output folder"),
        (["--list-checkpoints", "--check"], "needs the output folder"),
        (["run.yaml", "--list-checkpoints", "output"], "stands alone, without run.yaml"),
        (["--list-checkpoints", "output", "--check"], "stands alone, without --check"),
        (["--list-checkpoint", "output"], "did you mean --list-checkpoints"),
    ],
)
def test_mistakes_of_the_command_line(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        main(argv)
    if "did you mean" not in message:
        assert str(error.value).endswith("usage: train_fsdp2.py --list-checkpoints OUTPUT_DIR")


@pytest.mark.parametrize("as_one_word", [False, True])
def test_the_command_needs_no_torch(tmp_path: Path, repository: Path, as_one_word: bool) -> None:
    make(tmp_path, 10)
    argv = [f"--list-checkpoints={tmp_path}"] if as_one_word else ["--list-checkpoints", str(tmp_path), "--debug"]
    code = (
        f"import runpy, sys\nsys.argv = ['train_fsdp2.py', *{argv!r}]\n"
        "try:\n    runpy.run_path('train_fsdp2.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith("whole, latest")


def test_only_the_first_rank_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, 10)
    monkeypatch.setenv("RANK", "1")
    assert main(["--list-checkpoints", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
