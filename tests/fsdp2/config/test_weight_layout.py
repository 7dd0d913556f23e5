"""Which files are weights, and that a fingerprint tells them from others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.weight_layout import fingerprint, weight_files


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{number}.weight": torch.randn(100, 80, generator=generator) for number in range(12)}


def test_files_are_those_that_are_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no weights; expected model\.safetensors"):
        weight_files(tmp_path)
    for name in ("training_args.bin", "consolidated.safetensors", "model.safetensors"):
        (tmp_path / name).touch()
        assert [path.name for path in weight_files(tmp_path)] == [name]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "consolidated.safetensors"}}')
    assert [path.name for path in weight_files(tmp_path)] == ["consolidated.safetensors"]


@pytest.mark.parametrize("write", [save_file, torch.save])
def test_one_changed_tensor_changes_the_fingerprint(tmp_path: Path, write: object) -> None:
    """As of an adapter on one layer that was merged: neither the size nor the ends of the file tell."""
    assert callable(write)
    base, merged = tmp_path / "base" / "model", tmp_path / "merged" / "model"
    for path in (base, merged):
        path.parent.mkdir()
    write(tensors(), base)
    changed = tensors()
    changed["layers.6.weight"] += 1e-3
    write(changed, merged)
    assert base.stat().st_size == merged.stat().st_size
    assert fingerprint([base]) != fingerprint([merged])
    assert fingerprint([base]) == fingerprint([Path(shutil.copy(base, tmp_path / "moved"))])
