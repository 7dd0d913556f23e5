"""Sources and places that are right, but odd: as hub caches, shells and disks of users have them; and indexes that lie.

Others stand elsewhere: other forms of a directory and cut off files in `test_readers`, tied models, MTP and dtypes in
`test_convert`, both spellings of rotary positions in `test_families`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.errors import UserError
from tests.support.mounts import mounted
from tests.tasks.checkpoint import grid_toys, toys
from tests.tasks.checkpoint.test_convert import expect_same_hf, expect_same_mg
from tests.tasks.checkpoint.test_layout import EP, PP, TP

INDEX = "model.safetensors.index.json"
TRACKER = "latest_checkpointed_iteration.txt"


def sharded(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    """A small model in two weight files with an index, and a third file that has a header only."""
    source = toys.toy(folder, family, **changes)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2], "c.safetensors": []}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, source / file, metadata={"format": "pt"})
    write_index(source, {name: file for file, members in files.items() for name in members})
    return source


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """An index of these tensors."""
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def read_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


# Symlinks


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """A snapshot as hub caches have it: each file is a relative link to a blob that is named by its hash."""
    source = sharded(tmp_path / "plain")
    blobs, snapshot = tmp_path / "models--x--y" / "blobs", tmp_path / "models--x--y" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in source.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blobs / digest)
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", digest))
    return snapshot


def test_symlink_farm(hub_cache: Path, tmp_path: Path) -> None:
    """Of the source and of --hf-cfg-dir; what is written are files, and the cache stays as it is."""
    (hub_cache / "tokenizer.json").symlink_to(hub_cache / "config.json")
    before = sorted(str(path) for path in hub_cache.parents[1].rglob("*"))
    toys.run(hub_cache, tmp_path / "mg", TP, "2", "--verify", "full")
    toys.run(tmp_path / "plain", tmp_path / "expected", TP, "2")
    expect_same_mg(tmp_path / "expected", tmp_path / "mg")
    toys.run(tmp_path / "mg", tmp_path / "back", "--hf-cfg-dir", str(hub_cache), of="mg", to="hf")
    expect_same_hf(tmp_path / "plain", tmp_path / "back")
    assert not [path for path in tmp_path.glob("back/*") if path.is_symlink()]
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (hub_cache / "config.json").read_bytes()
    assert sorted(str(path) for path in hub_cache.parents[1].rglob("*")) == before


def test_folders_that_are_symlinks(hub_cache: Path, tmp_path: Path) -> None:
    """Those of a source, of a checkpoint, of its iteration and of its ranks."""
    (tmp_path / "latest").symlink_to(hub_cache)
    toys.run(tmp_path / "latest", tmp_path / "mg", TP, "2")
    iteration = tmp_path / "mg" / "iter_0000001"
    (tmp_path / "elsewhere").mkdir()
    for path in (iteration / "mp_rank_00", iteration):
        moved = path.rename(tmp_path / "elsewhere" / path.name)
        path.symlink_to(moved)
    (tmp_path / "link").symlink_to(tmp_path / "mg")
    toys.run(tmp_path / "link", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(tmp_path / "plain", tmp_path / "back")


def test_links_to_nothing_are_named(hub_cache: Path, tmp_path: Path) -> None:
    """As an interrupted download leaves them."""
    (hub_cache / "b.safetensors").resolve().unlink()
    with pytest.raises(UserError, match=r"of which 1 are missing: b\.safetensors"):
        toys.run(hub_cache, tmp_path / "mg")
    assert not (tmp_path / "mg").exists()


# Indexes


def test_stale_shards_are_not_read(tmp_path: Path) -> None:
    """Files that the index does not name, with other values under the same names."""
    source = sharded(tmp_path / "hf")
    tensors = load_file(source / "a.safetensors")
    toys.run(source, tmp_path / "expected", TP, "2")
    save_file({name: torch.zeros_like(value) for name, value in tensors.items()}, source / "model-old.safetensors")
    toys.run(source, tmp_path / "mg", TP, "2")
    expect_same_mg(tmp_path / "expected", tmp_path / "mg")


def test_header_only_shards(tmp_path: Path) -> None:
    """Without an index, so that all files are read."""
    source = sharded(tmp_path / "hf")
    toys.run(source, tmp_path / "expected", TP, "2")
    (source / INDEX).unlink()
    assert load_file(source / "c.safetensors") == {}
    toys.run(source, tmp_path / "mg", TP, "2")
    expect_same_mg(tmp_path / "expected", tmp_path / "mg")


def _lacks_one(source: Path) -> str:
    name = "model.layers.1.mlp.up_proj.weight"
    file = source / read_index(source)[name]
    save_file({key: value for key, value in load_file(file).items() if key != name}, file)
    return rf"says that tensor {name} is in {file.name}, which does not have it"


def _elsewhere(source: Path) -> str:
    name = "model.layers.1.mlp.up_proj.weight"
    files = {"a.safetensors", "b.safetensors"}
    [other] = files - {read_index(source)[name]}
    write_index(source, read_index(source) | {name: other})
    return rf"says that tensor {name} is in {other}, which does not have it"


def _twice_in_files(source: Path) -> str:
    one, other = (load_file(source / name) for name in ("a.safetensors", "b.safetensors"))
    name = sorted(one)[0]
    save_file(other | {name: torch.zeros_like(one[name])}, source / "b.safetensors")
    return rf"tensor {name} is in two files, a\.safetensors and b\.safetensors"


def _twice_in_index(source: Path) -> str:
    name, file = next(iter(read_index(source).items()))
    text = (source / INDEX).read_text()
    (source / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{name}": "{file}", '))
    return f"{name} is in it twice"


def _empty_file(source: Path) -> str:
    (source / "b.safetensors").write_bytes(b"")
    return r"b\.safetensors is empty; copy it again"


def _no_object(source: Path) -> str:
    (source / INDEX).write_text("[1, 2]")
    return "not a weight index"


def _of_another_model(source: Path) -> str:
    write_index(source, read_index(source) | {"model.layers.9.mlp.up_proj.weight": "a.safetensors"})
    return "model.layers.9.mlp.up_proj.weight is in a.safetensors, which does not have it"


@pytest.mark.parametrize(
    "damage",
    [_lacks_one, _elsewhere, _twice_in_files, _twice_in_index, _empty_file, _no_object, _of_another_model],
)
def test_indexes_that_do_not_fit(damage: Callable[[Path], str], tmp_path: Path) -> None:
    """The tensor and the file are named, and nothing is written."""
    source = sharded(tmp_path / "hf")
    message = damage(source)
    with pytest.raises(UserError, match=message):
        toys.run(source, tmp_path / "mg")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("in_file", [False, True])
def test_redundant_head_of_a_tied_model_in_the_index(in_file: bool, tmp_path: Path) -> None:
    """Index and file have it, or the index alone."""
    source = sharded(tmp_path / "hf", tie_word_embeddings=True)
    expected = load_file(source / "a.safetensors") | load_file(source / "b.safetensors")
    index = read_index(source) | {"lm_head.weight": "b.safetensors"}
    if in_file:
        head = {"lm_head.weight": expected["model.embed_tokens.weight"].clone()}
        save_file(load_file(source / "b.safetensors") | head, source / "b.safetensors")
    write_index(source, index)
    dropped = toys.run(source, tmp_path / "mg", PP, "2").plan.dropped
    assert dropped == ({"lm_head.weight": "a copy of model.embed_tokens.weight"} if in_file else {})
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    found = grid_toys.read(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


# Names and places


@pytest.mark.parametrize("name", ["with a space", "模型 一", "ünï-côdé", "a'b\"c", "[x]*?", "-dash", "name.partial"])
def test_names_of_folders(name: str, tmp_path: Path) -> None:
    """Also of those that are searched by a pattern."""
    source = sharded(tmp_path / name / "hf")
    toys.run(source, tmp_path / name / "mg", TP, "2", PP, "2", "--verify", "full")
    toys.run(tmp_path / name / "mg", tmp_path / name / name, "--hf-cfg-dir", str(source), of="mg", to="hf")
    expect_same_hf(source, tmp_path / name / name)
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == sorted(["hf", "mg", name])


def test_relative_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    source = toys.toy(Path("hf"), "qwen3")
    toys.run(source, Path("mg"), TP, "2")
    toys.run(Path("./mg/"), Path("../back/deep/er"), "--hf-cfg-dir", "hf", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back" / "deep" / "er")
    # Into the folder itself, which holds other things.
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    (tmp_path / "out" / "notes.md").write_text("mine")
    toys.run(tmp_path / "here" / "hf", Path("."), TP, "2")
    expect_same_mg(tmp_path / "here" / "mg", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "here", "out"]


def test_save_dir_that_links_to_what_is_not_there_yet(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    (tmp_path / "mg").symlink_to(tmp_path / "disk" / "mg")
    toys.run(source, tmp_path / "mg")
    assert (tmp_path / "mg").is_symlink() and (tmp_path / "disk" / "mg" / TRACKER).exists()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["mg"]


def test_a_source_inside_of_what_would_be_replaced(tmp_path: Path) -> None:
    """A checkpoint may be named by its iteration, too, which --overwrite would remove."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg", TP, "2")
    before = {path: path.read_bytes() for path in (tmp_path / "mg").rglob("*") if path.is_file()}
    for load in ("mg", "mg/iter_0000001"):
        with pytest.raises(UserError, match="choose another folder"):
            toys.run(tmp_path / load, tmp_path / "mg", PP, "2", "--overwrite", of="mg")
    assert {path: path.read_bytes() for path in (tmp_path / "mg").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("to", ["mg", "hf"])
def test_read_only_place(to: str, tmp_path: Path) -> None:
    """The parent of the output cannot be written; sources may be on a read-only disk."""
    source = toys.toy(tmp_path / "made", "qwen3")
    toys.run(source, tmp_path / "mg", TP, "2")
    with mounted(tmp_path / "disk", "size=8m") as disk:
        shutil.copytree(source, disk / "hf")
        shutil.copytree(tmp_path / "mg", disk / "mg")
        (disk / "there").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        load = disk / ("hf" if to == "mg" else "mg")
        of = "hf" if to == "mg" else "mg"
        for save in (disk / "new", disk / "there", disk / "there" / "deeper"):
            with pytest.raises(UserError, match=rf"--save-dir {save}: cannot be made there \(Read-only file system"):
                toys.run(load, save, of=of, to=to)
        toys.run(load, tmp_path / "out", "--verify", "full", of=of, to=to)


# Models


def test_biases_of_query_key_and_value_over_four_ranks(tmp_path: Path) -> None:
    """By hand: 8 heads of 6 in 4 groups; each of the four ranks has one group, [q q k v]."""
    source = toys.toy(tmp_path / "hf", "qwen25")
    toys.run(source, tmp_path / "mg", TP, "4")
    hf = toys.read_hf(source)
    for rank, tensors in enumerate(toys.read_mg(tmp_path / "mg").values()):
        for kind in ("weight", "bias"):
            query, key, value = (hf[f"model.layers.2.self_attn.{name}_proj.{kind}"] for name in "qkv")
            expected = torch.cat(
                [query[rank * 12 : rank * 12 + 12], key[rank * 6 : rank * 6 + 6], value[rank * 6 : rank * 6 + 6]]
            )
            assert torch.equal(tensors[f"decoder.layers.2.self_attention.linear_qkv.{kind}"], expected)
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")


@pytest.mark.parametrize("tp", [2, 4])
def test_vocabulary_of_1003(tp: int, tmp_path: Path) -> None:
    """Padded to 128 times the ranks and back to 1003 rows, whatever the last ranks have of it."""
    source = toys.toy(tmp_path / "hf", "qwen25", vocab_size=1003)
    toys.run(source, tmp_path / "mg", TP, str(tp), "--make-vocab-size-divisible-by", "128")
    shapes = [tuple(rank["output_layer.weight"].shape) for rank in toys.read_mg(tmp_path / "mg").values()]
    assert shapes == [(1024 // tp, 48)] * tp
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")


def test_a_share_that_is_all_padding_has_the_dtype_of_the_others(tmp_path: Path) -> None:
    """Most tensors of this model are fp32, its embedding is bf16."""
    source = toys.toy(tmp_path / "hf", "qwen25", vocab_size=100, tie_word_embeddings=True)
    tensors = {
        name: value if "embed" in name else value.float()
        for name, value in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, source / "model.safetensors")
    toys.run(source, tmp_path / "mg", TP, "4", PP, "2", "--padded-vocab-size", "512")
    ranks = toys.read_mg(tmp_path / "mg")
    ends = [value for tensors in ranks.values() for key, value in tensors.items() if key.split(".")[0] in ENDS]
    assert len(ends) == 8 and {value.dtype for value in ends} == {torch.bfloat16}
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")


ENDS = ("embedding", "output_layer")


def test_names_of_a_language_model_in_shards(tmp_path: Path) -> None:
    """`model.language_model.` in the files and in the index."""
    source = sharded(tmp_path / "hf")
    toys.run(source, tmp_path / "expected", TP, "2")
    for name in ("a.safetensors", "b.safetensors"):
        tensors = load_file(source / name)
        save_file({_prefixed(key): value for key, value in tensors.items()}, source / name)
    write_index(source, {_prefixed(name): file for name, file in read_index(source).items()})
    toys.run(source, tmp_path / "mg", TP, "2")
    expect_same_mg(tmp_path / "expected", tmp_path / "mg")
    write_index(source, read_index(source) | {_prefixed("model.layers.0.strange"): "a.safetensors"})
    with pytest.raises(
        UserError, match=r"says that tensor model\.language_model\.layers\.0\.strange is in a\.safetens"
    ):
        toys.run(source, tmp_path / "again", TP, "2")


def _prefixed(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def test_arguments_that_say_another_implementation(tmp_path: Path) -> None:
    """Names of Mamba have one form; training with Transformer Engine writes down that it does."""
    source = toys.toy(tmp_path / "hf", "mamba2")
    toys.run(source, tmp_path / "mg", TP, "2")
    for path in (tmp_path / "mg").glob("*/*/*.pt"):
        content = torch.load(path, weights_only=False)
        content["args"].transformer_impl = "transformer_engine"
        torch.save(content, path)
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3-moe")
    toys.run(source, tmp_path / "mg", TP, "2", EP, "2")
    gone = tmp_path / "mg" / "iter_0000001" / "mp_rank_01_001"
    shutil.rmtree(gone)
    with pytest.raises(UserError, match=rf"{gone}/model_optim_rng\.pt is missing"):
        toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    assert not (tmp_path / "back").exists()
