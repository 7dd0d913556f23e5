"""Folders that cannot be written to: one message, and nothing half written."""

import subprocess
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
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
        with pytest.raises(UserError, match="out cannot be written to"):
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


def test_a_file_in_place_of_the_folder(toys: Path) -> None:
    (toys / "file").touch()
    for prefix in ("file/data", "file/deeper/data"):
        for argv in ([], ["--check"]):
            with pytest.raises(UserError, match=r"--output-prefix file/.*: .*file"):
                preprocess(*SFT, *argv, prefix=prefix)
    for prefix in ("out/", "out/.", ".."):
        with pytest.raises(UserError, match=r"is a folder; add the begin"):
            preprocess(*SFT, prefix=prefix)
