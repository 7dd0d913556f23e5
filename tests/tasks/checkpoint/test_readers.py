"""Input files: data only, damage named, and the forms in which checkpoints come."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import torch_file
from mindspeed_llm.tasks.checkpoint.hf_reader import open_hf
from mindspeed_llm.tasks.checkpoint.torch_file import Inert, read_torch_file
from tests.tasks.checkpoint import toys


class Boom:
    """Runs a command when a plain unpickler meets it."""

    def __reduce__(self):
        return os.system, ("touch was_here",)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("bad", [Boom(), Path.cwd, eval, argparse.ArgumentParser])
def test_other_classes_are_refused(protocol: int, bad: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model_optim_rng.pt"
    torch.save({"model": {"w": torch.ones(2)}, "args": bad}, path, pickle_protocol=protocol)
    with pytest.raises(UserError, match=f"{path} asks for .* was not loaded"):
        read_torch_file(path)
    assert not (tmp_path / "was_here").exists()


class Namespace:
    """Has the name of a class that is allowed, and is another one."""

    def __reduce__(self):
        return Namespace, ()


HIDDEN = {
    "inside the arguments": lambda: argparse.Namespace(hidden_size=48, kind=Boom()),
    "in a list of the arguments": lambda: argparse.Namespace(lists=[{"kind": (1, Boom())}]),
    "as a key": lambda: {eval: 1},
    "under the name of an allowed class": Namespace,
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("where", HIDDEN)
def test_classes_that_hide_are_refused(
    where: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the arguments of a checkpoint that is otherwise right, and beside the weights of a Hugging Face model."""
    monkeypatch.chdir(tmp_path)
    source = toys.toy(tmp_path / "hf", "qwen3")
    tensors = load_file(source / "model.safetensors")
    toys.run(source, tmp_path / "mg")
    [rank_file] = (tmp_path / "mg").glob("*/*/*.pt")
    content = torch.load(rank_file, weights_only=False)
    torch.save(content | {"args": HIDDEN[where]()}, rank_file, pickle_protocol=protocol)
    (source / "model.safetensors").unlink()
    torch.save(tensors | {"more": HIDDEN[where]()}, source / "pytorch_model.bin", pickle_protocol=protocol)
    for folder, of in (("mg", "mg"), ("hf", "hf")):
        with pytest.raises(UserError, match=r"asks for .*, which a checkpoint of weights has no use for"):
            toys.run(tmp_path / folder, tmp_path / "out", of=of, to="mg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mg"]


# name: what a pickle asks for, as GLOBAL opcodes name it
DISGUISES = {
    "a class of its name in another module": ("evil", "Namespace"),
    "an attribute of an allowed class": ("argparse", "Namespace.__init__"),
    "a module inside an allowed one": ("argparse", "_os.system"),
    "a rebuilder of torch that looks up more": ("torch._utils", "_rebuild_tensor_v3"),
    "a function of builtins": ("builtins", "exec"),
    "an allowed name of builtins in another module": ("os", "set"),
    "the loader itself": ("torch", "load"),
}


@pytest.mark.parametrize("name", DISGUISES)
def test_disguises_are_refused(name: str, tmp_path: Path) -> None:
    module, attribute = DISGUISES[name]
    for number, code in enumerate(
        (
            b"\x80\x02" + f"c{module}\n{attribute}\n".encode() + b"(tR.",
            # STACK_GLOBAL takes dots for attributes of attributes
            b"\x80\x04" + b"".join(_text(word) for word in (module, attribute)) + b"\x93)R.",
        )
    ):
        path = tmp_path / f"{number}.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/data.pkl", code)
        with pytest.raises(UserError, match=f"asks for {module}.{attribute}, which"):
            read_torch_file(path)


def _text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


@pytest.mark.parametrize(
    ("module", "name"),
    [("argparse", "Namespace"), ("megatron.core.enums", "ModelType"), ("torch._utils", "_rebuild_parameter")],
)
def test_a_pickle_changes_no_class_of_this_process(module: str, name: str, tmp_path: Path) -> None:
    """The BUILD opcode sets attributes of whatever stands on the stack, classes included."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + f"c{module}\n{name}\n".encode() + b"(N}\x8c\x07touchedK\x01stb.")
    with contextlib.suppress(UserError):
        read_torch_file(tmp_path / "x.pt")
    kinds = (argparse.Namespace, Inert, torch_file.StoredTensor, torch_file._Unpickler._tensor)
    assert not [kind for kind in kinds if hasattr(kind, "touched")]


@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_and_plain_values(protocol: int, tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    content = {
        "strided": base.T[1:3],
        "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "args": argparse.Namespace(noop_layers={1, 2}, dtype=torch.bfloat16, shape=torch.Size([2])),
    }
    torch.save(content, tmp_path / "x.pt", pickle_protocol=protocol)
    found = read_torch_file(tmp_path / "x.pt")
    for name in ("strided", "parameter", "scalar", "empty"):
        assert torch.equal(found[name].view(), content[name].detach()), name
    assert found["args"].noop_layers == {1, 2} and found["args"].dtype is torch.bfloat16


def test_megatron_classes_are_inert(tmp_path: Path) -> None:
    """What training writes into its arguments is read without Megatron, and without running its code."""
    code = (
        b"\x80\x02cargparse\nNamespace\nq\x00)\x81q\x01}q\x02X\x04\x00\x00\x00kindq\x03"
        b"cmegatron.core.enums\nModelType\nq\x04K\x01\x85q\x05Rq\x06sb."
    )
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as archive:
        archive.writestr("y/data.pkl", code)
    kind = read_torch_file(tmp_path / "y.pt").kind
    assert isinstance(kind, Inert) and kind.values == (1,)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_cut_off_files_are_named(keep: float, tmp_path: Path) -> None:
    toys.toy(tmp_path / "hf", "qwen3")
    weights = tmp_path / "hf" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(UserError, match=f"{weights}.*copy it again"):
        toys.run(tmp_path / "hf", tmp_path / "mg")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_cut_off_rank_file_is_named(tmp_path: Path) -> None:
    toys.run(toys.toy(tmp_path / "hf", "qwen3"), tmp_path / "mg")
    [file] = (tmp_path / "mg").glob("*/*/*.pt")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match=f"{file}.*cut off"):
        toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")


def test_forms_of_hugging_face_directories(tmp_path: Path) -> None:
    """Shards with an index, header-only shards, pickled weights, symlink farms, names of a larger model."""
    plain = toys.toy(tmp_path / "plain", "qwen3")
    tensors = load_file(plain / "model.safetensors")
    config = (plain / "config.json").read_text()
    forms = {name: tmp_path / name for name in ("shards", "bin", "links", "prefixed")}
    for folder in forms.values():
        folder.mkdir()
        (folder / "config.json").write_text(config)

    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2], "nothing.safetensors": []}
    for file, members in halves.items():
        save_file({name: tensors[name] for name in members}, forms["shards"] / file)
    index = {"weight_map": {name: file for file, members in halves.items() for name in members}}
    (forms["shards"] / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(tensors, forms["bin"] / "pytorch_model.bin")
    (forms["links"] / "model.safetensors").symlink_to(plain / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value
        for name, value in tensors.items()
    }
    save_file(renamed, forms["prefixed"] / "model.safetensors")

    expected = toys.read_mg(_converted(plain))
    for folder in forms.values():
        found = toys.read_mg(_converted(folder))
        for path, of_rank in expected.items():
            assert {key: toys.summary(value) for key, value in found[path].items()} == {
                key: toys.summary(value) for key, value in of_rank.items()
            }, folder.name


def _converted(folder: Path) -> Path:
    output = folder.with_name(folder.name + "_mg")
    toys.run(folder, output, "--target-tensor-parallel-size", "2")
    return output


def test_header_that_does_not_align_its_tensors(tmp_path: Path) -> None:
    value = torch.arange(5, dtype=torch.float32)
    header = json.dumps({"w": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}).encode()
    header += b" " * (1 - len(header) % 2)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + value.numpy().tobytes())
    assert torch.equal(open_hf(tmp_path)["w"].view(), value)


def test_missing_shard_and_twice_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(UserError, match=r"names 1 files, of which 1 are missing: gone\.safetensors"):
        open_hf(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"w": torch.ones(1)}, tmp_path / name)
    with pytest.raises(UserError, match="tensor w is in two files"):
        open_hf(tmp_path)


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"latest_checkpointed_iteration\.txt is missing"):
        toys.run(tmp_path, tmp_path / "out", of="mg", to="hf")
    with pytest.raises(UserError, match=r"config\.json is missing"):
        toys.run(tmp_path, tmp_path / "out")


def test_pickles_that_are_no_files_of_torch(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"w": 1}))
    with pytest.raises(UserError, match="no complete file of"):
        read_torch_file(tmp_path / "x.pt")
