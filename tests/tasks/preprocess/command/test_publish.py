"""Publishing: cut off anywhere, old and new files never stand together as one whole."""

from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.publish import naming_the_folder, publish
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter, indexed_exists
from mindspeed_llm.tasks.preprocess.sample_store import summary_file

KEYS = ("input_ids", "labels")


def _write(prefix: Path, value: int) -> None:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(prefix) as writer:
        writer.add(np.array([value]))


def _old_and_new(folder: Path) -> tuple[Path, dict[Path, Path], list[Path]]:
    prefix = folder / "data"
    for key in KEYS:
        _write(folder / f"data_packed_{key}_document", 1)
        _write(folder / "work" / key, 2)
    _write(folder / "data_packed_attention_mask_document", 1)
    summary_file(prefix).write_text("old")
    (folder / "work" / "summary").write_text("new")
    made = {folder / f"data_packed_{key}_document": folder / "work" / key for key in KEYS}
    return prefix, made, [folder / "data_packed_attention_mask_document"]


class _CutOff(Exception):
    pass


def test_cut_off_after_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for steps in range(100):
        folder = tmp_path / str(steps)
        folder.mkdir()
        prefix, made, stale = _old_and_new(folder)
        left = steps
        with monkeypatch.context() as patch:
            for name in ("replace", "unlink"):
                original = getattr(Path, name)

                def counted(self: Path, *args: object, original: object = original, **options: object) -> object:
                    nonlocal left
                    if not left:
                        raise _CutOff
                    left -= 1
                    return original(self, *args, **options)  # type: ignore[operator]

                patch.setattr(Path, name, counted)
            try:
                publish(prefix, made, folder / "work" / "summary", stale=stale)
            except _CutOff:
                finished = False
            else:
                finished = True
        summary = summary_file(prefix).read_text() if summary_file(prefix).exists() else None
        values = {int(IndexedReader(final)[0][0]) for final in made if indexed_exists(final)}
        whole = all(indexed_exists(final) for final in made)
        outcomes.append((summary, whole, values))
        assert len(values) <= 1 or not whole
        assert summary != "new" or (whole and values == {2})
        assert summary != "old" or (whole and values == {1})
        if finished:
            break
    assert outcomes[0] == ("old", True, {1}) and outcomes[-1] == ("new", True, {2}) and len(outcomes) > 9
    assert not list(folder.glob("*attention_mask*"))


def test_errors_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = (
        r"--output-prefix .*file/data: cannot write to .*; nothing was published; a part of the folder's path is a file"
    )
    with pytest.raises(UserError, match=words), naming_the_folder(tmp_path / "file" / "data"):
        (tmp_path / "file" / "data").mkdir(parents=True)
    with pytest.raises(FileNotFoundError), naming_the_folder(tmp_path / "data"):
        (tmp_path / "no" / "such").read_text()
    # A file elsewhere that cannot be read is not the fault of the output.
    with pytest.raises(PermissionError), naming_the_folder(tmp_path / "data"):
        raise PermissionError(13, "Permission denied", "/somewhere/input.jsonl")
    words = r"cannot write to .* \(No space left on device\); nothing was published; free some space"
    with pytest.raises(UserError, match=words), naming_the_folder(tmp_path / "data"):
        raise OSError(28, "No space left on device")
