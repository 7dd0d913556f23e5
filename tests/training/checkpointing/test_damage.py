"""Damaged, unfinished and malicious checkpoints: the one before is taken and the file named; nothing is executed."""

from __future__ import annotations

import argparse
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

from mindspeed_llm.checkpoints.files import DamagedCheckpoint, describe_file
from mindspeed_llm.training.checkpointing.layout import TRACKER
from mindspeed_llm.training.checkpointing.manifest import FILE_NAME, read_manifest, write_manifest
from tests.support.pool import RankPool
from tests.training.checkpointing.conftest import Workplace

pytestmark = pytest.mark.distributed
CHOOSE = "tests.training.checkpointing.rows:choose"
FLAGS = ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer"]
FILES = {
    "torch": [
        *(f"mp_rank_0{rank}/{name}" for rank in (0, 1) for name in ("distrib_optim.pt", "model_optim_rng.pt")),
    ],
    "torch_dist": [".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json"],
}
PLACES = [(kind, name) for kind in FILES for name in (*FILES[kind], FILE_NAME)]


@pytest.fixture(scope="module")
def made(place: Workplace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In each format the checkpoints of a run on two ranks after one step and after two."""
    folders = {}
    for kind in FILES:
        folders[kind] = tmp_path_factory.mktemp(kind)
        saves = [(step, kind, folders[kind]) for step in (1, 2)]
        runs = place.train("llama_tied", 2, FLAGS, steps=2, save=folders[kind], saves=saves)
        assert [run["error"] for run in runs] == [None, None]
    return folders


@pytest.fixture
def copies(made: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    return {kind: Path(shutil.copytree(folder, tmp_path / kind)) for kind, folder in made.items()}


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


@pytest.mark.parametrize("kind", FILES)
def test_the_files_are_all_that_there_are(made: dict[str, Path], kind: str) -> None:
    newest = made[kind] / "iter_0000002"
    found = {str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()}
    assert found == {*FILES[kind], FILE_NAME}
    assert sorted(path.name for path in made[kind].iterdir()) == ["iter_0000001", "iter_0000002", TRACKER]
    assert (made[kind] / TRACKER).read_text() == "2"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_a_damaged_file_is_named(
    rank_pool: RankPool, made: dict[str, Path], tmp_path: Path, kind: str, name: str
) -> None:
    # Without manifest it is as if another program had written it.
    damages = [damage for damage in DAMAGES if (name, damage) != (FILE_NAME, "removed")]
    folders = {damage: Path(shutil.copytree(made[kind], tmp_path / damage)) for damage in damages}
    for damage, folder in folders.items():
        DAMAGES[damage](folder / "iter_0000002" / name)
    loads = [(str(folder), step) for folder in folders.values() for step in (None, 2)]
    answers = rank_pool.run(CHOOSE, ranks=2, loads=loads)
    for number, (damage, folder) in enumerate(folders.items()):
        newest = folder / "iter_0000002"
        for rank in answers:
            latest, named = rank[2 * number : 2 * number + 2]
            assert latest["chosen"] == str(folder / "iter_0000001"), damage
            (line,) = latest["log"]
            assert line.startswith(f"skipped the damaged checkpoint {newest}: {newest / name} "), line
            reason = line.removeprefix(f"skipped the damaged checkpoint {newest}: ")
            assert named["error"] == f"CheckpointError: {reason}"


def test_every_bit_of_the_manifest_counts(copies: dict[str, Path]) -> None:
    path = copies["torch"] / "iter_0000002" / FILE_NAME
    content = path.read_bytes()
    for place in [*range(0, len(content), 61), *range(len(content) - 45, len(content))]:
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
                read_manifest(path.parent)


def test_what_is_no_finished_checkpoint_is_passed_over(rank_pool: RankPool, copies: dict[str, Path]) -> None:
    folder = copies["torch"]

    def chosen(step: int | None = None) -> Any:
        ((found,),) = rank_pool.run(CHOOSE, ranks=1, loads=[(str(folder), step)])
        return found

    # Never published; published by a run that was killed before the tracker moved; of another step than it says.
    shutil.copytree(folder / "iter_0000002", folder / "iter_0000003.tmp")
    assert chosen()["chosen"] == str(folder / "iter_0000002")
    shutil.copytree(folder / "iter_0000002", folder / "iter_0000004")
    found = chosen()
    assert found["chosen"] == str(folder / "iter_0000002")
    assert any("names step 2: iter_0000004, which lie beyond it, are not taken" in line for line in found["log"])
    assert chosen(4)["error"] == f"CheckpointError: {folder}/iter_0000004 holds the checkpoint of step 2"
    # The tracker names what is not there; is no tracker; is missing.
    (folder / TRACKER).write_text("3")
    found = chosen()
    assert found["chosen"] == str(folder / "iter_0000002")
    assert any(f"{folder}/iter_0000003 is missing" in line for line in found["log"])
    shutil.rmtree(folder / "iter_0000004")
    for change in (lambda: (folder / TRACKER).write_text("two"), (folder / TRACKER).unlink):
        change()
        found = chosen()
        assert found["chosen"] == str(folder / "iter_0000002")
        assert re.search(rf"{TRACKER} (is missing|says 'two', expected).*looking for the newest", found["log"][0])
    # All are damaged; none has a manifest, so that nothing tells whether they are whole.
    for step in (1, 2):
        (folder / f"iter_000000{step}" / "mp_rank_01" / "model_optim_rng.pt").unlink()
    found = chosen()
    assert "every checkpoint is damaged" in found["error"]
    assert all(f"iter_000000{step}/mp_rank_01/model_optim_rng.pt is missing" in found["error"] for step in (1, 2))
    for step in (1, 2):
        (folder / f"iter_000000{step}" / FILE_NAME).unlink()
    assert "name one with --ckpt-step (1, 2)" in chosen()["error"]


@pytest.mark.parametrize("kind", FILES)
def test_training_goes_on_from_the_one_before(place: Workplace, copies: dict[str, Path], kind: str) -> None:
    folder = copies[kind]
    flip(folder / "iter_0000002" / FILES[kind][-2])
    runs = place.train("llama_tied", 2, FLAGS, steps=2, load=folder, save=folder, saves=[(2, kind, folder)])
    assert [(run["error"], run["start"]) for run in runs] == [(None, 1)] * 2
    assert any("skipped the damaged checkpoint" in line for line in runs[0]["log"])
    # The damaged one made room.
    assert sorted(path.name for path in folder.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    ((found,), _) = place.pool.run(CHOOSE, ranks=2, loads=[(str(folder), None)])
    assert found["chosen"] == str(folder / "iter_0000002") and not found["log"]
    assert (folder / "set_aside.1" / "iter_0000002").is_dir()


class Touch:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def forge(folder: Path, name: str) -> None:
    """Write the manifest anew so that it agrees with a changed file: a hash is no protection."""
    manifest = read_manifest(folder)
    assert manifest is not None
    write_manifest(folder, replace(manifest, files={**manifest.files, name: describe_file(folder / name)}))


def _saved(name: str, change: Callable[[dict[str, Any], Path], None]) -> Callable[[Path, Path], None]:
    """Change a file of torch.save: ours, so that loading it is safe here."""

    def attack(folder: Path, touched: Path) -> None:
        content = torch.load(folder / name, weights_only=False)
        change(content, touched)
        torch.save(content, folder / name)

    return attack


def _metadata(change: Callable[[Any, Path], None]) -> Callable[[Path, Path], None]:
    def attack(folder: Path, touched: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata, touched)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return attack


def _evil_piece(folder: Path, touched: Path) -> None:
    """A tensor's piece that is a program, in the place where the metadata says that the tensor lies."""
    torch.save(Touch(touched), folder / "__1_0.distcp")
    size = (folder / "__1_0.distcp").stat().st_size

    def point(metadata: Any, _: Path) -> None:
        for index, place in metadata.storage_data.items():
            if place.relative_path == "__1_0.distcp":
                metadata.storage_data[index] = replace(place, offset=0, length=size)

    _metadata(point)(folder, touched)
    forge(folder, ".metadata")


def _evil_object(folder: Path, touched: Path) -> None:
    """The random state of a rank, an object, that is a program."""
    evil = folder / "evil.pt"
    torch.save([Touch(touched)], evil)

    def point(metadata: Any, _: Path) -> None:
        for index, place in metadata.storage_data.items():
            if index.fqn.startswith("rng_state/"):
                metadata.storage_data[index] = replace(
                    place, relative_path=evil.name, offset=0, length=evil.stat().st_size
                )

    _metadata(point)(folder, touched)
    forge(folder, evil.name)


def _set(**values: Any) -> Callable[[Any, Path], None]:
    def change(target: Any, touched: Path) -> None:
        for name, value in values.items():
            setattr(target, name, value(touched))

    return change


def _args(content: dict[str, Any], touched: Path) -> None:
    content["args"] = argparse.Namespace(**vars(content["args"]), more=Touch(touched))


def _lose_a_piece(metadata: Any, _: Path) -> None:
    entry = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    del entry.chunks[0]


def _elsewhere(metadata: Any, _: Path) -> None:
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = replace(place, relative_path="../x")


def _forget_a_tensor(metadata: Any, _: Path) -> None:
    metadata.state_dict_metadata["embedding.word_embeddings.weight"] = BytesStorageMetadata()


Change = Callable[[Any, Path], None]
Attack = tuple[str, str, Callable[[Path, Path], None], str]
"""Format, changed file, what changes it, what the error says."""


def _rank_file(name: str, change: Change, said: str) -> Attack:
    return "torch", name, _saved(name, change), said


def _described(change: Change, said: str) -> Attack:
    return "torch_dist", ".metadata", _metadata(change), said


_STATES, _BUFFERS = "mp_rank_01/model_optim_rng.pt", "mp_rank_01/distrib_optim.pt"
_ASKS = r"asks for posix\.system"
ATTACKS: dict[str, Attack] = {
    "arguments": _rank_file("mp_rank_00/model_optim_rng.pt", _args, _ASKS),
    "a rank's random state": _rank_file(
        _STATES, lambda content, touched: content.update(rng_state=Touch(touched)), f"{_STATES} {_ASKS}"
    ),
    "optimizer": _rank_file(
        _BUFFERS, lambda content, touched: content.update(more=Touch(touched)), f"{_BUFFERS} {_ASKS}"
    ),
    "common.pt": ("torch_dist", "common.pt", _saved("common.pt", _args), rf"iter_0000002/common\.pt {_ASKS}"),
    ".metadata": _described(_set(planner_data=Touch), rf"iter_0000002/\.metadata {_ASKS}"),
    "a piece": ("torch_dist", "__1_0.distcp", _evil_piece, rf"rank \d: \S+/__1_0\.distcp {_ASKS}"),
    "an object": ("torch_dist", ".metadata", _evil_object, rf"rank \d: \S+/rng_state/shard_\S+ {_ASKS}"),
    # Not malicious, but not what the program writes either: the file is named, no rank waits for another.
    "no model": _rank_file(_STATES, lambda content, _: content.pop("model"), f"{_STATES}: has no model"),
    "no counters": _rank_file(
        _STATES,
        lambda content, _: content["mindspeed_llm"]["state"].update(consumed_train_samples="many"),
        "consumed_train_samples is 'many', expected a number",
    ),
    "no random state": _rank_file(
        _STATES,
        lambda content, _: content["rng_state"][0].update(np_rng_state=7),
        "the state of random numbers cannot be used .*--no-load-rng",
    ),
    "short buffers": _rank_file(_BUFFERS, lambda content, _: content.pop(0), f"{_BUFFERS}: has no buffer 0"),
    "a tensor that is not whole": _described(_lose_a_piece, r"\.metadata: the pieces of embedding\S+ do not cover it"),
    "a file elsewhere": _described(_elsewhere, r"\.metadata names \.\./x, which is not a file of this directory"),
    "no places": _described(_set(storage_data=lambda _: None), r"\.metadata does not say where the tensors lie"),
    "an entry without tensor": _described(
        _forget_a_tensor, r"1 tensors are not in it \(embedding\.word_embeddings\.weight\)"
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_is_executed(
    place: Workplace, copies: dict[str, Path], tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, changed, attack, said = ATTACKS[name]
    folder, touched = copies[kind] / "iter_0000002", tmp_path / "touched"
    attack(folder, touched)
    forge(folder, changed)
    runs = place.train("llama_tied", 2, FLAGS, steps=3, load=copies[kind])
    for run in runs:
        assert run["error"] is not None and re.search(said, run["error"]), run["error"]
        assert not re.search("weights_only|[Rr]e-running", run["error"])
    assert not touched.exists()


def test_the_attacks_would_work(copies: dict[str, Path], tmp_path: Path) -> None:
    """Otherwise refusing them proves nothing."""
    for number, (kind, name, attack) in enumerate(
        [
            ("torch_dist", ".metadata", ATTACKS[".metadata"][2]),
            ("torch_dist", "common.pt", ATTACKS["common.pt"][2]),
            ("torch", "mp_rank_01/distrib_optim.pt", ATTACKS["optimizer"][2]),
        ]
    ):
        touched = tmp_path / str(number)
        attack(copies[kind] / "iter_0000002", touched)
        path = copies[kind] / "iter_0000002" / name
        pickle.loads(path.read_bytes()) if name == ".metadata" else torch.load(path, weights_only=False)
        assert touched.exists()
