"""Damaged and malicious checkpoints: `latest` passes over the damaged one and names the file, nothing is executed."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mindspeed_llm.fsdp2.checkpoint.manifest import describe_file, read_manifest, write_manifest
from tests.distributed.test_resume import Workplace
from tests.support.pool import RankPool

pytestmark = pytest.mark.distributed
CHOOSE = "tests.distributed.runs:choose"
FILES = [
    "manifest.json",
    ".metadata",
    "__0_0.distcp",
    "__1_0.distcp",
    "extra_state/extra_state_rank_0.pt",
    "extra_state/extra_state_rank_1.pt",
]


@pytest.fixture(scope="module")
def place(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A run of 4 steps on 2 ranks with checkpoints after 2 and 4."""
    place = Workplace(rank_pool, tmp_path_factory.mktemp("damaged"), toy="llama_uneven", data="lf")
    place.run("run", 2, max_steps=4, save_steps=2, save_hf_weights=False)
    return place


@pytest.fixture
def output(place: Workplace, tmp_path: Path) -> Path:
    """A copy of that run's folder."""
    return Path(shutil.copytree(place.folder / "run", tmp_path / "run"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "bit-flipped": flip,
    "removed": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def test_the_files_are_all_that_there_are(output: Path) -> None:
    newest = output / "checkpoints" / "global_step_4"
    found = {str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()}
    assert found == set(FILES)
    assert (output / "checkpoints" / "latest").read_text() == "global_step_4\n"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(rank_pool: RankPool, output: Path, name: str) -> None:
    checkpoints = output / "checkpoints"
    newest, older = checkpoints / "global_step_4", checkpoints / "global_step_2"
    whole = shutil.copytree(newest, output / "copy")
    for damage, apply in DAMAGES.items():
        apply(newest / name)
        latest = rank_pool.run(CHOOSE, ranks=2, output=str(output), wanted="latest")
        assert [rank["chosen"] for rank in latest] == [str(older)] * 2, damage
        (line,) = latest[0]["log"]
        assert line.startswith(f"skipped the damaged checkpoint {newest}: {newest / name} "), damage
        explicit = rank_pool.run(CHOOSE, ranks=2, output=str(output), wanted=str(newest))
        reason = line.removeprefix(f"skipped the damaged checkpoint {newest}: ")
        assert [rank["error"] for rank in explicit] == [f"training.resume_from_checkpoint: {reason}"] * 2
        shutil.rmtree(newest)
        shutil.copytree(whole, newest)


def test_every_bit_of_the_manifest_counts(output: Path) -> None:
    """It holds the data position, so a changed digit would go unnoticed until the samples are wrong."""
    from mindspeed_llm.checkpoints.files import DamagedCheckpoint

    path = output / "checkpoints" / "global_step_4" / "manifest.json"
    content = path.read_bytes()
    for place in [*range(0, len(content), 97), *range(len(content) - 45, len(content))]:
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
                read_manifest(path.parent)


def test_all_checkpoints_damaged(rank_pool: RankPool, output: Path) -> None:
    for step in (2, 4):
        (output / "checkpoints" / f"global_step_{step}" / "__1_0.distcp").unlink()
    for rank in rank_pool.run(CHOOSE, ranks=2, output=str(output), wanted="latest"):
        assert rank["chosen"] is None and "every checkpoint" in rank["error"]
        assert all(f"global_step_{step}/__1_0.distcp is missing" in rank["error"] for step in (2, 4))


def test_training_ends_with_the_line_or_goes_on_from_the_one_before(place: Workplace, output: Path) -> None:
    newest = output / "checkpoints" / "global_step_4"
    flip(newest / "__1_0.distcp")
    shutil.copytree(output, place.folder / "damaged")
    newest = place.folder / "damaged" / "checkpoints" / "global_step_4"
    common = {"max_steps": 6, "save_steps": 2, "save_hf_weights": False}
    refused = place.run("damaged", 2, resume_from_checkpoint=str(newest), **common)
    assert all(f"{newest}/__1_0.distcp has other content" in rank["error"] for rank in refused)
    assert {rank["code"] for rank in refused} == {1}
    resumed = place.run("damaged", 2, resume_from_checkpoint="latest", **common)
    assert [rank["code"] for rank in resumed] == [0, 0]
    assert any(line.startswith("Resumed from") and "global_step_2 after step 2" in line for line in resumed[0]["log"])


class Touch:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def forge(folder: Path, name: str) -> None:
    """Write the manifest anew so that it agrees with a changed file: a hash is no protection."""
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, files={**manifest.files, name: describe_file(folder / name)}))


def evil_metadata(folder: Path, touched: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Touch(touched)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def evil_state(folder: Path, touched: Path) -> None:
    path = folder / "extra_state" / "extra_state_rank_1.pt"
    torch.save({**torch.load(path), "more": Touch(touched)}, path)


def evil_entry(folder: Path, touched: Path) -> None:
    """An entry that is no tensor: torch's own reader would unpickle it."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["extra"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def evil_piece(folder: Path, touched: Path) -> None:
    """A tensor's piece that is a program, in the place where the metadata says that the tensor lies."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    torch.save(Touch(touched), folder / "__1_0.distcp")
    size = (folder / "__1_0.distcp").stat().st_size
    for index, place in metadata.storage_data.items():
        if place.relative_path == "__1_0.distcp":
            metadata.storage_data[index] = replace(place, offset=0, length=size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    forge(folder, ".metadata")


def mangled_piece(folder: Path, touched: Path) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))


def old_format_piece(folder: Path, touched: Path) -> None:
    """A pickle of another protocol, at which torch warns and advises to load without its protection."""
    path = folder / "__1_0.distcp"
    size = path.stat().st_size
    path.write_bytes(pickle.dumps({"a": Touch(touched)}, protocol=4).ljust(size, b"\0"))


def mangled_state(folder: Path, touched: Path) -> None:
    torch.save([1, 2], folder / "extra_state" / "extra_state_rank_1.pt")


def mangled_metadata(folder: Path, touched: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.storage_data = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def metadata_that_names_a_file_elsewhere(folder: Path, touched: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = replace(place, relative_path="../x")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("attack", "name", "said"),
    [
        (mangled_piece, "__1_0.distcp", r"failed on rank \d: \S+/global_step_4/__1_0\.distcp "),
        (old_format_piece, "__1_0.distcp", r"failed on rank \d: \S+/global_step_4/__1_0\.distcp "),
        (mangled_state, "extra_state/extra_state_rank_1.pt", r"extra_state_rank_1\.pt holds no random state"),
        (mangled_metadata, ".metadata", r"\.metadata does not say where the tensors lie"),
        (metadata_that_names_a_file_elsewhere, ".metadata", r"\.metadata names \.\./x, which is not a file of this"),
    ],
)
def test_what_the_hashes_do_not_find_is_named(
    place: Workplace,
    output: Path,
    tmp_path: Path,
    attack: Callable[[Path, Path], None],
    name: str,
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """For `latest`, too: a checkpoint that cannot be read although it is as it was written is not passed over."""
    folder, touched = output / "checkpoints" / "global_step_4", tmp_path / "touched"
    attack(folder, touched)
    forge(folder, name)
    shutil.copytree(output, place.folder / f"odd_{attack.__name__}")
    for rank in place.run(f"odd_{attack.__name__}", 2, max_steps=6, resume_from_checkpoint="latest"):
        assert rank["code"] == 1 and re.search(said, rank["error"]), rank["error"]
        assert "weights_only" not in rank["error"] and "re-running" not in rank["error"]
    assert "Warning:" not in capfd.readouterr().err
    assert not touched.exists()


@pytest.mark.parametrize(
    ("attack", "name", "said"),
    [
        (evil_metadata, ".metadata", r"\.metadata asks for posix\.system"),
        (evil_state, "extra_state/extra_state_rank_1.pt", r"extra_state_rank_1\.pt asks for posix\.system"),
        (evil_entry, ".metadata", r"\.metadata: entry extra is no tensor"),
        (evil_piece, "__1_0.distcp", r"failed on rank \d: \S+__1_0\.distcp asks for posix\.system"),
    ],
)
def test_a_malicious_checkpoint_is_refused(
    place: Workplace, output: Path, tmp_path: Path, attack: Callable[[Path, Path], None], name: str, said: str
) -> None:
    folder, touched = output / "checkpoints" / "global_step_4", tmp_path / "touched"
    attack(folder, touched)
    forge(folder, name)
    for rank in place.run(f"evil_{attack.__name__}", 2, max_steps=6, resume_from_checkpoint=str(folder)):
        assert rank["code"] == 1 and re.search(said, rank["error"]), rank["error"]
    assert not touched.exists()
    # The attack itself is sound: torch's own unpickling would have run it.
    if name == ".metadata" and attack is evil_metadata:
        pickle.loads((folder / ".metadata").read_bytes())
        assert touched.exists()
