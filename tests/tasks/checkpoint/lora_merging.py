"""Merging adapters in tests of what is refused."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.errors import UserError
from tests.tasks.checkpoint import toys

FUSED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def merge(base: Path, adapter: Path, tmp_path: Path, *flags: str) -> None:
    """Try to merge; nothing may be left behind where that fails."""
    before = sorted(path.name for path in tmp_path.iterdir())
    try:
        toys.run(base, tmp_path / "merged", "--lora-load", str(adapter), *flags, of="mg", to="hf")
    except UserError:
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        raise
