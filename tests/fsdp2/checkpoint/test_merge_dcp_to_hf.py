"""The offline tool on checkpoints of one process: memory, and what it says about directories that it cannot use.

That it equals the export of a training run is shown in tests/distributed/test_merge.py.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import MetadataIndex
from transformers import PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint import hf_writer
from mindspeed_llm.fsdp2.checkpoint.dcp_tensors import CheckpointTensors
from mindspeed_llm.fsdp2.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    describe_file,
    size_text,
    write_manifest,
)
from mindspeed_llm.fsdp2.checkpoint.merge_dcp_to_hf import main
from tests.support.tokenizers import byte_tokenizer
from tests.support.toys import build_toy

# One process writes the checkpoints of these tests, and torch remarks on it.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
MIB = 1 << 20


def describe(folder: Path, source: Path, *, leave_out: str = "", **training: Any) -> None:
    """Write the manifest for the files that lie in `folder` now."""
    names = [path.name for path in folder.iterdir() if path.name not in ("manifest.json", "hf_ckpt", leave_out)]
    write_manifest(
        folder,
        Manifest(
            step=7,
            has_optimizer=False,
            files={name: describe_file(folder / name) for name in names},
            topology={"ranks": 1, "replicas": 1, "shards": 1, "micro_batch_size": 1, "accumulation": 1},
            progress={},
            versions={},
            config={"model": {"model_name_or_path": str(source)}, "training": training},
        ),
    )


def write_checkpoint(
    output: Path, model: PreTrainedModel, source: Path, *, more: dict[str, Any] | None = None, **training: Any
) -> Path:
    """A checkpoint of `model`, and beside it what is needed of the source: configuration and tokenizer."""
    folder = output / "checkpoints" / "global_step_7"
    folder.mkdir(parents=True)
    tied = set(model.all_tied_weights_keys or {})
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name not in tied}
    dcp.save({**tensors, **(more or {})}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    source.mkdir(exist_ok=True)
    model.config.save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    describe(folder, source, **training)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "output", build_toy("llama_tied"), tmp_path / "source")


def refuse(*argv: str | Path) -> str:
    with pytest.raises(UserError) as error:
        main([str(word) for word in argv])
    return str(error.value)


def test_values_types_and_shards(checkpoint: Path) -> None:
    state = build_toy("llama_tied").state_dict()
    assert main(["--load-dir", str(checkpoint), "--dtype", "bf16", "--shard-size", "20000"]) == 0
    folder = checkpoint / "hf_ckpt"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == state.keys() - {"lm_head.weight"}
    for name, file in index.items():
        assert torch.equal(load_file(folder / file)[name], state[name].to(torch.bfloat16)), name
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert not list(folder.glob(".*"))


# Each shard is 40 MB, the model 318 MB; the largest tensor has 33 MB.
BIG = {
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SHARD = 40_000_000


def test_memory_does_not_grow_with_the_model(tmp_path: Path, repository: Path) -> None:
    small = write_checkpoint(tmp_path / "small", build_toy("llama"), tmp_path / "small_source")
    big = write_checkpoint(tmp_path / "big", build_toy("llama", **BIG), tmp_path / "big_source")
    code = (
        "import sys\n"
        "from mindspeed_llm.fsdp2.checkpoint.merge_dcp_to_hf import main\n"
        "from mindspeed_llm.platform import memory\n"
        "small, big, shard = sys.argv[1:]\n"
        "main(['--load-dir', small])\n"  # imports, and everything else that is needed once
        "memory.reset_peak()\n"
        "before = memory.max_memory_allocated_gb()\n"
        "main(['--load-dir', big, '--shard-size', shard])\n"
        "print('grown by', memory.max_memory_allocated_gb() - before)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(small), str(big), str(SHARD)],
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    files = list((big / "hf_ckpt").glob("*.safetensors"))
    assert len(files) >= 8 and sum(path.stat().st_size for path in files) > 300_000_000
    assert all(f"Wrote {path.name}" in result.stdout for path in files)
    grown = float(result.stdout.rsplit("grown by ", 1)[1]) * 2**30
    assert grown < 3 * SHARD, f"{grown / MIB:.0f} MiB"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "__0_0.distcp has "),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"), "__0_0.distcp has other content"),
        (lambda path: path.unlink(), "__0_0.distcp is missing"),
        (lambda path: path.with_name(".metadata").unlink(), ".metadata is missing"),
        (lambda path: path.with_name("manifest.json").unlink(), "is no checkpoint, or one that was never finished"),
        (lambda path: path.with_name("manifest.json").write_text("{}"), "manifest.json"),
    ],
    ids=["cut", "bit flipped", "removed", "metadata removed", "manifest removed", "manifest damaged"],
)
def test_damage_is_named_before_anything_is_written(
    checkpoint: Path, harm: Callable[[Path], object], message: str
) -> None:
    harm(checkpoint / "__0_0.distcp")
    text = refuse("--load-dir", checkpoint)
    assert text.startswith("--load-dir: ") and message in text
    assert not (checkpoint / "hf_ckpt").exists()


def test_directories_that_are_no_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    assert "nowhere is no directory; expected" in refuse("--load-dir", tmp_path / "nowhere")
    assert "has no manifest.json" in refuse("--load-dir", tmp_path / "source")
    for folder in (tmp_path / "output", checkpoint.parent):
        assert refuse("--load-dir", folder).endswith(f"checkpoints of this run: {checkpoint}")


def test_model_directories_that_do_not_serve(checkpoint: Path, tmp_path: Path) -> None:
    text = refuse("--load-dir", checkpoint, "--model-configs", tmp_path)
    assert text.startswith(f"--model-configs: {tmp_path} has no config.json")
    other = tmp_path / "other"
    build_toy("llama").config.save_pretrained(other)
    text = refuse("--load-dir", checkpoint, "--model-configs", other)
    assert "belongs to another model: 1 tensors are not in it (model.lm_head.weight)" in text
    build_toy("llama_uneven", num_hidden_layers=4, tie_word_embeddings=True).config.save_pretrained(other)
    assert "has shape [509, 48] instead of [13, 9]" in refuse("--load-dir", checkpoint, "--model-configs", other)
    (tmp_path / "source").rename(tmp_path / "gone")
    text = refuse("--load-dir", checkpoint)
    assert text.startswith("the model.model_name_or_path of the run: ") and "--model-configs" in text


def test_the_source_model_is_not_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in (tmp_path / "source").iterdir())
    assert "would overwrite" in refuse("--load-dir", checkpoint, "--save-dir", tmp_path / "source")
    assert sorted(path.name for path in (tmp_path / "source").iterdir()) == before
    # Beside an adapter, `merged` is its model, which an export takes the place of.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "adapter_config.json").write_text("{}")
    merged = (tmp_path / "source").rename(tmp_path / "run" / "merged")
    text = refuse("--load-dir", checkpoint, "--model-configs", merged, "--save-dir", tmp_path / "run")
    assert f"would overwrite the source model {merged}" in text
    assert sorted(path.name for path in merged.iterdir()) == before


@pytest.mark.parametrize("size", ["0", "-5"])
def test_shard_size(checkpoint: Path, size: str) -> None:
    assert f"--shard-size: {size}" in refuse("--load-dir", checkpoint, "--shard-size", size)


@pytest.mark.parametrize(("text", "files"), [("5e9", 1), ("2e4", 5), ("20000", 5)])
def test_shard_size_in_other_notations(checkpoint: Path, text: str, files: int) -> None:
    assert main(["--load-dir", str(checkpoint), "--shard-size", text]) == 0
    found = len(list((checkpoint / "hf_ckpt").glob("*.safetensors")))
    assert (found == 1) == (files == 1)


@pytest.mark.parametrize("text", ["1.5", "many", "inf", "nan"])
def test_shard_size_that_is_no_whole_number(checkpoint: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--load-dir", str(checkpoint), "--shard-size", text])
    assert end.value.code == 2 and "is no whole number of bytes" in capsys.readouterr().err


def test_the_checkpoint_is_not_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "second", build_toy("llama_tied"), tmp_path / "source")
    before = sorted(checkpoint.rglob("*"))
    for folder, relation in (
        (checkpoint, "is"),
        (checkpoint / "extra_state", "lies in"),
        (checkpoint / ".." / checkpoint.name / "model", "lies in"),
        (other, "is"),
        (other / "model", "lies in"),
    ):
        text = refuse("--load-dir", checkpoint, "--save-dir", folder)
        assert f"{relation} the checkpoint" in text and text.startswith("--save-dir: ")
    (tmp_path / "file").write_text("")
    assert "is a file" in refuse("--load-dir", checkpoint, "--save-dir", tmp_path / "file")
    assert sorted(checkpoint.rglob("*")) == before
    # Of another checkpoint, too, this folder is free.
    assert main(["--load-dir", str(checkpoint), "--save-dir", str(other / "hf_ckpt")]) == 0


def test_sizes_are_shown_in_fitting_units(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--load-dir", str(checkpoint)])
    out = capsys.readouterr().out
    assert out.count(" MiB)") == 2 and "GiB" not in out
    assert [size_text(size) for size in (3000, 1 << 17, 1 << 27)] == ["2.93 KiB", "0.12 MiB", "0.12 GiB"]


def test_a_full_disk_leaves_the_earlier_result(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["--load-dir", str(checkpoint)])
    before = {path: path.read_bytes() for path in (checkpoint / "hf_ckpt").iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_writer.os, "fsync", full)
    assert "No space left on device" in refuse("--load-dir", checkpoint)
    assert {path: path.read_bytes() for path in (checkpoint / "hf_ckpt").iterdir()} == before


def test_files_of_other_nodes(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where every node has a disk of its own, a manifest lists the files of its node only."""
    describe(checkpoint, tmp_path / "source", leave_out="__0_0.distcp")
    assert main(["--load-dir", str(checkpoint)]) == 0
    assert "1 files come from other nodes" in capsys.readouterr().out
    (checkpoint / "__0_0.distcp").unlink()
    assert "lacks __0_0.distcp (1 of 1 files with weights)" in refuse("--load-dir", checkpoint)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_nothing_is_executed(checkpoint: Path, tmp_path: Path) -> None:
    """Files whose hashes are right, too: whoever can write the one can write the other."""
    trap = tmp_path / "trap"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(trap)))
    describe(checkpoint, tmp_path / "source")
    assert "asks for posix.mkdir" in refuse("--load-dir", checkpoint)
    entry = write_checkpoint(tmp_path / "two", build_toy("llama"), tmp_path / "source", more={"model.x": Evil(trap)})
    assert "entry model.x is no tensor" in refuse("--load-dir", entry)
    third = write_checkpoint(tmp_path / "three", build_toy("llama"), tmp_path / "source")
    metadata = pickle.loads((third / ".metadata").read_bytes())
    info = next(iter(metadata.storage_data.values()))
    torch.save(Evil(trap), third / "evil.distcp")
    info.relative_path, info.offset, info.length = "evil.distcp", 0, (third / "evil.distcp").stat().st_size
    (third / ".metadata").write_bytes(pickle.dumps(metadata))
    describe(third, tmp_path / "source")
    assert "evil.distcp asks for posix.mkdir" in refuse("--load-dir", third)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.storage_data.pop(index(m)), "does not say where model.model.norm.weight"),
        (lambda m: m.state_dict_metadata[NORM].chunks.clear(), "have 0 numbers instead of 48"),
        (lambda m: setattr(m.storage_data[index(m)], "relative_path", "../x"), "names ../x, which is not a file of"),
        (lambda m: setattr(m.storage_data[index(m)], "offset", 1), "was not loaded|cannot be read"),
    ],
    ids=["no place", "no pieces", "outside", "elsewhere"],
)
def test_metadata_that_does_not_fit(checkpoint: Path, change: Callable[[Any], object], message: str) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpoint, match=message):
        CheckpointTensors(checkpoint).read(NORM, torch.float32)


NORM = "model.model.norm.weight"


def index(metadata: Any) -> MetadataIndex:
    return MetadataIndex(NORM, metadata.state_dict_metadata[NORM].chunks[0].offsets)


def test_help_needs_no_torch(repository: Path) -> None:
    code = (
        "import sys\nfrom mindspeed_llm.fsdp2.checkpoint.merge_dcp_to_hf import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "--model-configs" in result.stdout


def test_the_command(checkpoint: Path, repository: Path) -> None:
    command = [sys.executable, "-m", "mindspeed_llm.fsdp2.checkpoint.merge_dcp_to_hf", "--load-dir"]
    result = subprocess.run(
        [*command, str(checkpoint.parent)], cwd=repository, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.startswith(f"error: --load-dir: {checkpoint.parent} is no checkpoint")
