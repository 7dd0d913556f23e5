"""The benchmark of conversions runs, on toys; what it measures there says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import convert, convert_models
from mindspeed_llm.tasks.checkpoint.hf_reader import open_hf


def test_models_have_the_sizes_they_say(tmp_path: Path) -> None:
    """Bytes of the full models, from their headers; a toy is written."""
    for config, gigabytes in ((convert_models.DENSE, 1.19), (convert_models.MOE, 0.84)):
        shapes = convert_models.shapes(config)
        assert sum(2 * shape.numel() for shape in shapes.values()) / 1e9 == pytest.approx(gigabytes, abs=0.005)
    folder = convert_models.make(tmp_path / "toy", convert_models.MOE | convert_models.TINY)
    tensors = {name: stored.view() for name, stored in open_hf(folder).items()}
    assert len(tensors) == len(convert_models.shapes(convert_models.MOE)) and all(v.any() for v in tensors.values())


def test_both_directions(tmp_path: Path, capsys: pytest.CaptureFixture[str], repository: Path) -> None:
    """One of them beside another converter, for which this one stands in."""
    flags = ["--toy", "--pairs", "1", "--folder", str(tmp_path)]
    convert.main([*flags, "--models", "moe", "--directions", "hf", "--upstream", str(repository)])
    convert.main([*flags, "--models", "dense", "--directions", "mg"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 + 5, lines
    for case in ("moe, hf -> mg", "dense, mg -> hf"):
        assert any(line.startswith(f"{case}, pair 1: work ") and "; floor: work " in line for line in lines)
        for what in ("work time of ours / floor's", "whole command of ours / floor's", "CPU time of ours / floor's"):
            assert any(line.startswith(f"{case}: {what}: median ") for line in lines), what
        assert any(line.startswith(f"{case}: peak ") and "beside mapped files" in line for line in lines)
    assert any(line.startswith("moe, hf -> mg: whole command of upstream's / ours: median ") for line in lines)
    assert not list(tmp_path.iterdir())


def test_memory_of_many_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert.main(["--toy", "--memory", "--pairs", "1", "--folder", str(tmp_path)])
    [line] = capsys.readouterr().out.splitlines()
    assert " MB at 28 layers, " in line and " MB at 56 (" in line
