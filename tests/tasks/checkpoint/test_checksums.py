"""Damage after a conversion: the checksums of files, in the report beside them and in rank files themselves."""

from __future__ import annotations

import hashlib
import json
import os
import random
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import crc32
from mindspeed_llm.tasks.checkpoint.report import REPORT
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_layout import EP, PP, TP


def test_joined_equals_zlib() -> None:
    chance = random.Random(0)
    for _ in range(100):
        parts = [chance.randbytes(chance.choice([0, 1, 3, 500, 70000])) for _ in range(chance.randrange(6))]
        assert crc32.joined((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("flags", [[TP, "2", PP, "2", EP, "2", "--moe-grouped-gemm"], ["--padded-vocab-size", "600"]])
def test_rank_files_have_right_checksums(flags: list[str], tmp_path: Path) -> None:
    """Python's zipfile reads every entry and compares; the files of torch itself pass as well."""
    toys.run(toys.toy(tmp_path / "hf", "qwen3-moe"), tmp_path / "mg", *flags)
    for path in tmp_path.glob("mg/*/*/*.pt"):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None, path
            assert sum(name.split("/")[1] == "data" and info.CRC != 0 for name, info in archive.NameToInfo.items()) > 9


@pytest.mark.parametrize("to", ["mg", "hf"])
def test_report_has_right_checksums(to: str, tmp_path: Path) -> None:
    source, of = toys.toy(tmp_path / "hf", "qwen3"), "hf"
    if to == "hf":
        toys.run(source, tmp_path / "from", TP, "2")
        source, of = tmp_path / "from", "mg"
    for mode, kinds in (("full", {"crc32", "sha256"}), ("sample", {"crc32"}), ("none", {"crc32"})):
        output = tmp_path / mode
        toys.run(source, output, "--verify", mode, "--max-shard-size", "100KB", of=of, to=to)
        files = json.loads((output / REPORT).read_text())["output"]["files"]
        assert {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()} == {REPORT, *files}
        for name, file in files.items():
            content = (output / name).read_bytes()
            assert file["bytes"] == len(content)
            assert file["crc32"] == f"{zlib.crc32(content):08x}", name
            assert file.get("sha256", "") == (hashlib.sha256(content).hexdigest() if mode == "full" else "")
            assert file.keys() - {"bytes", "tensors"} == kinds


@pytest.mark.parametrize("report", [True, False])
def test_damaged_rank_files(report: bool, tmp_path: Path) -> None:
    """Found by the report, and without one by what `torch.save` files say of themselves."""
    toys.run(toys.toy(tmp_path / "hf", "qwen3"), tmp_path / "mg", TP, "2")
    if not report:
        (tmp_path / "mg" / REPORT).unlink()
    toys.run(tmp_path / "mg", tmp_path / "back", "--verify", "full", of="mg", to="hf")
    path = tmp_path / "mg" / "iter_0000001" / "mp_rank_01" / "model_optim_rng.pt"
    flip(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match=rf"{path}: .*CRC-32.*copy it again"):
        toys.run(tmp_path / "mg", tmp_path / "again", "--verify", "full", of="mg", to="hf")
    assert not (tmp_path / "again").exists()


def test_damaged_weights_of_a_hugging_face_directory(tmp_path: Path) -> None:
    toys.run(toys.toy(tmp_path / "hf", "qwen3"), tmp_path / "mg")
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    path = tmp_path / "back" / "model.safetensors"
    flip(path, path.stat().st_size - 5)
    with pytest.raises(UserError, match=rf"{path}: its CRC-32 is .*damaged, copy it again"):
        toys.run(tmp_path / "back", tmp_path / "again", "--verify", "full")
    (tmp_path / "back" / REPORT).unlink()
    toys.run(tmp_path / "back", tmp_path / "again", "--verify", "full")


def test_damaged_pickled_weights(tmp_path: Path) -> None:
    plain = toys.toy(tmp_path / "hf", "qwen3")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "config.json").write_text((plain / "config.json").read_text())
    torch.save(toys.read_hf(plain), folder / "pytorch_model.bin")
    toys.run(folder, tmp_path / "mg", "--verify", "full")
    flip(folder / "pytorch_model.bin", os.stat(folder / "pytorch_model.bin").st_size // 2)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: the CRC-32 of its entry .*/data/\d+ is"):
        toys.run(folder, tmp_path / "again", "--verify", "full")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "not a report of a conversion"),
        ('{"output": {"files": {"../x": {"bytes": 1}}}}', "names files outside of its folder"),
        ('{"output": {"files": {"/etc/passwd": {"bytes": 1}}}}', "names files outside of its folder"),
        ('{"output": {"files": ["x"]}}', "not a report of a conversion"),
    ],
)
def test_reports_are_data(content: str, what: str, tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg")
    (tmp_path / "mg" / REPORT).write_text(content)
    with pytest.raises(UserError, match=what):
        toys.run(source, tmp_path / "mg", "--overwrite")
