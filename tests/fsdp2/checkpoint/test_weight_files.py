"""Tensors of a model directory, read slice by slice, against slices of the tensors that were written."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.weight_files import (
    Concatenated,
    LazyTensor,
    Stacked,
    Transposed,
    full_index,
    open_weights,
)


def parts(folder: Path, *shapes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[LazyTensor]]:
    """Random tensors, and the same ones as stored in a file."""
    tensors = [torch.randn(shape) for shape in shapes]
    save_file({f"t{i}": tensor for i, tensor in enumerate(tensors)}, folder / "model.safetensors")
    stored = open_weights(folder)
    return tensors, [stored[f"t{i}"] for i in range(len(tensors))]


# Each entry: the shapes of the stored parts, the whole tensor by torch, the lazy tensor.
COMPOSITIONS: dict[str, tuple[list[tuple[int, ...]], Callable, Callable]] = {
    "stored": ([(5, 7)], lambda ts: ts[0], lambda ps: ps[0]),
    "stored vector": ([(9,)], lambda ts: ts[0], lambda ps: ps[0]),
    "stacked": ([(4, 6)] * 5, lambda ts: torch.stack(ts), lambda ps: Stacked(ps, 0)),
    "stacked inside": ([(4, 6)] * 3, lambda ts: torch.stack(ts, 1), lambda ps: Stacked(ps, 1)),
    "concatenated": ([(3, 6), (1, 6), (4, 6)], lambda ts: torch.cat(ts), lambda ps: Concatenated(ps, 0)),
    "concatenated columns": ([(3, 2), (3, 5)], lambda ts: torch.cat(ts, 1), lambda ps: Concatenated(ps, 1)),
    "transposed": ([(4, 6)], lambda ts: ts[0].T, lambda ps: Transposed(ps[0], 0, 1)),
    "transposed inside": ([(3, 4, 5)], lambda ts: ts[0].transpose(1, 2), lambda ps: Transposed(ps[0], 1, 2)),
    "gate and up of experts": (
        [(4, 6)] * 6,
        lambda ts: torch.cat([torch.stack(ts[:3]), torch.stack(ts[3:])], dim=1),
        lambda ps: Concatenated([Stacked(ps[:3], 0), Stacked(ps[3:], 0)], 1),
    ),
    "transposed experts": (
        [(4, 6)] * 3,
        lambda ts: torch.stack(ts).transpose(1, 2),
        lambda ps: Transposed(Stacked(ps, 0), 1, 2),
    ),
}


@pytest.mark.parametrize("kind", COMPOSITIONS)
def test_a_slice_equals_the_slice_of_the_whole(tmp_path: Path, kind: str) -> None:
    shapes, whole_of, lazy_of = COMPOSITIONS[kind]
    tensors, stored = parts(tmp_path, *shapes)
    whole, lazy = whole_of(tensors), lazy_of(stored)
    assert lazy.shape == tuple(whole.shape)
    assert lazy.dtype == whole.dtype
    assert torch.equal(lazy.read(full_index(lazy.shape)), whole)
    for dim, size in enumerate(whole.shape):
        for start in range(size + 1):
            for stop in range(start, size + 1):
                index = list(full_index(lazy.shape))
                index[dim] = slice(start, stop)
                assert torch.equal(lazy.read(tuple(index)), whole[tuple(index)]), (dim, start, stop)
    index = tuple(slice(size // 3, size // 3 + 2) for size in whole.shape)
    assert torch.equal(lazy.read(index), whole[index])


def test_a_scalar_and_every_dtype(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    dtypes += [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {str(dtype): torch.tensor([[0, 1], [1, 0]]).to(dtype) for dtype in dtypes}
    tensors["scalar"] = torch.tensor(2.5)
    save_file(tensors, tmp_path / "model.safetensors")
    stored = open_weights(tmp_path)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = stored[name].read(full_index(tensor.shape))
        assert stored[name].dtype == read.dtype == tensor.dtype
        assert torch.equal(read.float(), tensor.float())


def test_unequal_experts_are_refused(tmp_path: Path) -> None:
    _, stored = parts(tmp_path, (4, 6), (4, 5))
    with pytest.raises(UserError, match=r"differ in shape: \[\(4, 5\), \(4, 6\)\]"):
        Stacked(stored, 0)


# --- What is read


def resident_bytes(path: Path) -> int:
    """Bytes of `path` that are mapped into this process and in memory, as the kernel counts them (Rss of smaps)."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split(" ", 1)[0].count("-") == 1 and ":" not in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks the Linux kernel")
def test_a_shard_touches_its_own_bytes_of_the_file_only(tmp_path: Path) -> None:
    """Pages of the mapped file that are in this process: none after opening, and a sixteenth for a sixteenth.

    The kernel maps neighbouring pages that are cached already on a fault, so the file is put out of its cache first.
    """
    tensor = torch.randn(4096, 1024)  # 16 MiB
    path = tmp_path / "model.safetensors"
    save_file({"w": tensor}, path)
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    stored = open_weights(tmp_path)["w"]
    opened = resident_bytes(path)
    assert opened < tensor.nbytes / 16
    index = (slice(2048, 2048 + 256), slice(0, 1024))
    assert torch.equal(stored.read(index), tensor[index])
    assert resident_bytes(path) - opened < tensor.nbytes / 4
    assert torch.equal(stored.read(full_index(tensor.shape)), tensor)
    assert resident_bytes(path) > tensor.nbytes * 3 / 4 or mmap.PAGESIZE > 65536  # the measure itself can see a read


class Recorded:
    """A lazy tensor that keeps the indices it is asked for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype
        self.elements = 0

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        self.elements += self.tensor[index].numel()
        return self.tensor[index]


def test_compositions_ask_their_parts_for_the_requested_elements_only() -> None:
    experts = [Recorded(torch.randn(4, 6)) for _ in range(6)]
    lazy = Concatenated([Stacked(experts[:3], 0), Stacked(experts[3:], 0)], 1)
    found = lazy.read((slice(1, 2), slice(2, 7), slice(0, 6)))
    assert found.shape == (1, 5, 6)
    # Rows 2, 3 of the second gate and rows 0, 1, 2 of the second up; nothing of the other experts.
    assert [expert.elements for expert in experts] == [0, 2 * 6, 0, 0, 3 * 6, 0]
    part = Recorded(torch.randn(4, 6))
    Transposed(part, 0, 1).read((slice(0, 3), slice(1, 2)))
    assert part.elements == 3


# --- Which files


def write_index(folder: Path, weight_map: dict[str, str], name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_indexed_shards_are_read_and_other_files_are_not(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"stale": torch.zeros(3)}, tmp_path / "old.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    stored = open_weights(tmp_path)
    assert {name: tensor.shape for name, tensor in stored.items()} == {"a": (2,), "b": (3,)}


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    with pytest.raises(UserError, match=r"2 files, of which 1 are missing: model-00002-of-00002\.safetensors"):
        open_weights(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": ["a"]}'])
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json: not a weight index"):
        open_weights(tmp_path)


@pytest.mark.parametrize("left", [0, 4, 60, -8])
def test_a_truncated_file(tmp_path: Path, left: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64)}, path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UserError, match=r"model\.safetensors: not a readable safetensors file .* Copy the weights"):
        open_weights(tmp_path)


def test_one_name_in_two_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "two.safetensors")
    with pytest.raises(UserError, match=r"tensor a is in two files: .*one\.safetensors and .*two\.safetensors"):
        open_weights(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model\.model_name_or_path: .* has no weights.*train_from_scratch"):
        open_weights(tmp_path)


@pytest.mark.parametrize("indexed", [False, True])
def test_files_of_torch_save(tmp_path: Path, indexed: bool) -> None:
    tensor = torch.randn(6, 4)
    torch.save({"w": tensor, "b": tensor[0].clone(), "note": 3}, tmp_path / "pytorch_model.bin")
    if indexed:
        write_index(tmp_path, {"w": "pytorch_model.bin", "b": "pytorch_model.bin"}, "pytorch_model.bin.index.json")
    stored = open_weights(tmp_path)
    assert stored.keys() == {"w", "b"}
    index = (slice(2, 5), slice(1, 3))
    assert torch.equal(stored["w"].read(index), tensor[index])


def test_safetensors_go_before_torch_files(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert torch.equal(open_weights(tmp_path)["w"].read((slice(0, 2),)), torch.ones(2))


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (open, (self.path, "w"))


def test_code_in_a_torch_file_is_refused_and_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    torch.save({"w": Malicious(str(victim))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: cannot be loaded as plain tensors"):
        open_weights(tmp_path)
    assert not victim.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)  # the file does what it is feared for
    assert victim.exists()


def test_a_torch_file_that_is_no_dictionary(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: holds a Tensor; expected tensors by name"):
        open_weights(tmp_path)


def test_what_a_trainer_leaves_beside_the_weights_is_not_opened(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"w": Malicious(str(tmp_path / "victim"))}, tmp_path / "training_args.bin")
    assert open_weights(tmp_path).keys() == {"w"}
