"""Folders that cannot be written to: one message, and nothing half written."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.workspace import Workspace
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from tests.support.mounts import mounted
from tests.tasks.preprocess.command.toys import RECORDS, SFT, contents, preprocess, summary, toys, write_jsonl

__all__ = ["toys"]


def test_read_only_folder(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mounted(toys / "out", "size=4m") as folder:
        preprocess(*SFT)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        before = contents(folder)
        with pytest.raises(UserError, match=r"cannot write to out \(Read-only file system\); nothing was published"):
            preprocess(*SFT, "--max-samples", "3")
        with pytest.raises(UserError, match="cannot be written: no permission for out"):
            preprocess(*SFT, "--max-samples", "3", "--check")
        # What is there can be used all the same.
        capsys.readouterr()
        preprocess(*SFT)
        assert "up to date" in capsys.readouterr().out and contents(folder) == before


@pytest.mark.parametrize("parts", ["1", "4"])
@pytest.mark.parametrize("pack", [[], ["--pack", "--seq-length", "600"]], ids=["plain", "packed"])
def test_disk_full(toys: Path, parts: str, pack: list[str]) -> None:
    write_jsonl(toys / "much.jsonl", [{**record, "output": "x " * 200} for record in RECORDS * 8])
    # The parts, or some of them, fit on the disk; all files do not.
    with mounted(toys / "out", "size=2500k") as folder:
        preprocess(*SFT, "--max-samples", "3")
        before = contents(folder)
        argv = [*SFT, *pack, "--n-subs", parts]
        with pytest.raises(UserError, match=r"cannot write to out \(No space left on device\).*free some space"):
            preprocess(*argv, source="much.jsonl")
        assert contents(folder) == before and summary(folder)["num_records"] == 3
        hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert hidden == ([".data.preprocess"] if parts == "4" else [])
        # With more space the same command goes on.
        subprocess.run(["mount", "-o", "remount,size=20m", str(folder)], check=True)
        preprocess(*argv, source="much.jsonl")
        assert summary(folder)["num_records"] == 480
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
        found = contents(folder)
    preprocess(*argv, source="much.jsonl", prefix="fresh/data")
    assert found == contents(toys / "fresh")


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        (
            "out/" + "n" * 250,
            "has 2[0-9]* bytes, more than the 255 that the file system allows; choose a shorter",
        ),
        ("d" * 300 + "/data", "File name too long"),
        ("out/" + "谢" * 84, "more than the 255"),
        ("new/" + "d" * 300 + "/data", "has 300 bytes, more than the 255"),
        ("/proc/none/data", "cannot (write to|be written to)"),
        ("loop/data", "loop is a link to nowhere"),
    ],
    ids=["long name", "long folder", "bytes count", "long new folder", "no folder can be made", "link to itself"],
)
def test_prefixes_that_cannot_be(toys: Path, prefix: str, words: str) -> None:
    (toys / "loop").symlink_to("loop")
    with IndexedWriter(toys / "parts" / "a_k") as writer:
        writer.add(np.array([1, 2]))
    for argv, source in ((SFT, "alpaca.jsonl"), (["--merge-group-keys", "k"], "parts")):
        with pytest.raises(UserError, match="--output-prefix .*" + words):
            preprocess(*argv, prefix=prefix, source=source)


def test_what_a_dead_run_left_goes_when_the_output_is_up_to_date(
    toys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess(*SFT)
    left = toys / "out" / ".data.preprocess"
    (left / "part-00000").mkdir(parents=True)
    (left / "part-00000" / "labels.bin").touch()
    with Workspace(toys / "out" / "data") as workspace:
        workspace.keep = True
        preprocess(*SFT)
        assert (left / "part-00000").is_dir()
    capsys.readouterr()
    preprocess(*SFT)
    assert "removing out/.data.preprocess, which an earlier run left" in capsys.readouterr().out
    assert not left.exists() and len(contents(toys / "out")) == 6
    preprocess(*SFT)
    assert "removing" not in capsys.readouterr().out


def test_a_file_in_place_of_the_folder(toys: Path) -> None:
    (toys / "file").touch()
    for prefix in ("file/data", "file/deeper/data"):
        for argv in ([], ["--check"]):
            with pytest.raises(UserError, match=r"--output-prefix file/.*: .*file"):
                preprocess(*SFT, *argv, prefix=prefix)
    for prefix in ("out/", "out/.", ".."):
        with pytest.raises(UserError, match=r"is a folder; add the begin"):
            preprocess(*SFT, prefix=prefix)
