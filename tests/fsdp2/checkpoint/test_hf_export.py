"""Writing a Hugging Face directory: shards by hand, permissions, and what is left when something fails.

That exported weights equal the loaded ones is shown on ranks in tests/distributed/test_export.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from mindspeed_llm.fsdp2.checkpoint import hf_writer
from mindspeed_llm.fsdp2.checkpoint.hf_export import export_model
from mindspeed_llm.fsdp2.checkpoint.hf_writer import HfWriter
from mindspeed_llm.tasks.checkpoint.safetensors_file import plan_shards
from tests.support.tokenizers import byte_tokenizer
from tests.support.toys import build_toy


@pytest.mark.parametrize(
    ("sizes", "limit", "files"),
    [
        ([3, 4, 3], 10, [[0, 1, 2]]),
        ([3, 4, 4], 10, [[0, 1], [2]]),
        ([3, 12, 4], 10, [[0], [1], [2]]),
        ([12, 1, 9, 1], 10, [[0], [1, 2], [3]]),
        ([10, 10], 10, [[0], [1]]),
        ([1] * 5, 2, [[0, 1], [2, 3], [4]]),
        ([0, 5, 0], 5, [[0, 1, 2]]),
    ],
)
def test_tensors_fill_files_in_order(sizes: list[int], limit: int, files: list[list[int]]) -> None:
    plan = plan_shards({f"t{i}": size for i, size in enumerate(sizes)}, limit)
    names = [[f"t{i}" for i in file] for file in files]
    n = len(files)
    if n == 1:
        assert plan.files == [("model.safetensors", names[0])]
    else:
        assert plan.files == [(f"model-{i + 1:05d}-of-{n:05d}.safetensors", members) for i, members in enumerate(names)]
    assert plan.total_size == sum(sizes)


def export(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    arguments = {"config": model.config, "dtype_of": lambda name: torch.float32, "shard_size": 10**9, "is_writer": True}
    export_model(model, folder, **{**arguments, **options})


def content(folder: Path) -> dict[str, bytes]:
    """All files under a folder, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def umask() -> Iterator[None]:
    """Puts the process's file mode mask back after the test."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_weight_files_get_the_permissions_of_other_files(tmp_path: Path, mask: int, mode: int) -> None:
    os.umask(mask)
    export(build_toy("llama_uneven"), tmp_path, shard_size=2000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == mode, path.name
    assert os.umask(mask) == mask  # reading the mask did not change it


def test_shards_hold_what_the_plan_says_and_no_more(tmp_path: Path) -> None:
    model = build_toy("qwen3_moe")
    export(model, tmp_path, shard_size=50_000, dtype_of=lambda name: torch.bfloat16)
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 50_000 or len(tensors) == 1
        # Parts of one big tensor must not drag the whole of it into the file.
        assert path.stat().st_size < size + 20_000


def test_a_rank_that_does_not_write_leaves_nothing(tmp_path: Path) -> None:
    export(build_toy("llama_uneven"), tmp_path / "out", is_writer=False)
    assert not (tmp_path / "out").exists()


def test_the_callers_config_is_not_changed(tmp_path: Path) -> None:
    model = build_toy("llama_uneven")
    config = build_toy("llama_uneven").config
    before = config.to_dict()
    export(model, tmp_path, config=config, dtype_of=lambda name: torch.bfloat16)
    assert config.to_dict() == before


def fail(*args: object, **options: object) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize("where", ["tokenizer", "weights", "config", "gather"])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_failure_leaves_the_earlier_export_and_no_staging_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, earlier: bool
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    if earlier:
        export(
            build_toy("llama_uneven", seed=1), folder, shard_size=2000, save_tokenizer=byte_tokenizer().save_pretrained
        )
    before = content(folder)
    options: dict[str, Any] = {"save_tokenizer": byte_tokenizer().save_pretrained}
    model = build_toy("llama_uneven", seed=2)
    if where == "tokenizer":
        options["save_tokenizer"] = fail
    elif where == "weights":
        monkeypatch.setattr(hf_writer.os, "fsync", fail)  # the first file is complete
    elif where == "config":
        monkeypatch.setattr(type(model.config), "save_pretrained", fail)
    else:
        monkeypatch.setattr(HfWriter, "add", fail)
    with pytest.raises(OSError, match="no space left"):
        export(model, folder, **options)
    assert content(folder) == before
    assert not (folder / ".hf_export").exists()


def test_a_staging_folder_of_a_killed_run_is_cleared(tmp_path: Path) -> None:
    stale = tmp_path / ".hf_export"
    stale.mkdir()
    (stale / "model-00001-of-00009.safetensors").write_bytes(b"half")
    export(build_toy("llama_uneven"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_other_files_of_the_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"old")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    export(build_toy("llama_uneven"), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_a_kill_while_publishing_leaves_no_mixture_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after each of the moves in turn: either no config.json, or the whole new export."""
    old, new = build_toy("llama", seed=0), build_toy("llama", seed=1)
    replace = os.replace

    class Killed(BaseException):
        pass

    def stop_after(moves: int) -> Callable[[Path, Path], None]:
        left = iter(range(moves))

        def move(source: Path, target: Path) -> None:
            if next(left, None) is None:
                raise Killed
            replace(source, target)

        return move

    for moves in range(20):
        export(old, tmp_path, shard_size=60_000)
        monkeypatch.setattr(hf_writer.os, "replace", stop_after(moves))
        try:
            export(new, tmp_path, shard_size=100_000)
            break  # the export needed no more moves: all places to stop have been tried
        except Killed:
            assert not (tmp_path / "config.json").exists()
        finally:
            monkeypatch.setattr(hf_writer.os, "replace", replace)
    assert moves > 4
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in new.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


def test_tensors_of_all_types_at_their_places(tmp_path: Path) -> None:
    """What safetensors reads is what was given: odd sizes, several types in one file, empty ones, scalars."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "byte": torch.tensor([1, 0, 1], dtype=torch.bool),
        "half": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "ünïcode": torch.randn(7, generator=generator),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "transposed": torch.randn(4, 3, generator=generator).T,
        "whole": torch.arange(5),
    }
    meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    finished: list[tuple[str, int, int]] = []
    with HfWriter(tmp_path, meta, 60, on_file=lambda *event: finished.append(event)) as writer:
        for name in reversed(tensors):
            writer.add({name: tensors[name]})
        writer.publish()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1 and [(done, count) for _, done, count in finished][-1] == (len(files), len(files))
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_nothing_is_published_while_tensors_are_missing(tmp_path: Path) -> None:
    meta = {name: torch.empty(2, device="meta") for name in "ab"}
    with HfWriter(tmp_path, meta, 100) as writer:
        writer.add({"a": torch.ones(2)})
        with pytest.raises(AssertionError, match=r"not complete: \['model.safetensors'\]"):
            writer.publish()
    assert list(tmp_path.iterdir()) == []
