"""An export takes the place of earlier ones of every kind, on plain files; with weights in train/test_adapters.py."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_llm.fsdp2.checkpoint.publish import publish

MODEL = ["config.json", "model.safetensors", "tokenizer.json"]
SHARDS = ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "tokenizer.json"]
ADAPTER = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
KINDS = {
    "model": MODEL,
    "shards": SHARDS,
    "adapter": ADAPTER,
    "merged": [*ADAPTER, *(f"merged/{name}" for name in SHARDS)],
}


class Killed(BaseException):
    pass


def write(folder: Path, names: list[str], text: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def loads(folder: Path) -> Iterator[tuple[str, str]]:
    """(file, content) of what transformers and PEFT read from a folder: an adapter, or a model with the adapter beside
    it.
    """
    if not ((folder / "config.json").exists() or (folder / "adapter_config.json").exists()):
        return
    for path in sorted(folder.iterdir()):
        if path.name in ("config.json", "adapter_config.json") or "model" in path.name:
            yield path.name, path.read_text()


def everything(folder: Path) -> dict[str, str]:
    merged = {f"merged/{name}": text for name, text in loads(folder / "merged")} if (folder / "merged").exists() else {}
    return dict(loads(folder)) | merged


@pytest.mark.parametrize(("old", "new"), [*itertools.product(KINDS, ("model", "shards", "adapter"))])
def test_a_kill_at_any_point_leaves_nothing_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    last = "adapter_config.json" if new == "adapter" else "config.json"
    replace, unlink = os.replace, Path.unlink
    seen: set[str] = set()
    for count in range(30):
        left = iter(range(count))

        def step(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Killed

        def counted_unlink(path: Path, missing_ok: bool = False, step=step) -> None:
            if path.exists():
                step()
            unlink(path, missing_ok=missing_ok)

        def counted_replace(source: Path, target: Path, step=step) -> None:
            step()
            replace(source, target)

        folder = write(tmp_path / f"{count}", KINDS[old], "old")
        staging = write(tmp_path / f"{count}.staging", KINDS[new], "new")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", counted_unlink)
            patched.setattr(os, "replace", counted_replace)
            try:
                publish(staging, folder, last=last)
                break
            except Killed:
                found = set(everything(folder).values())
                assert len(found) <= 1, everything(folder)
                seen |= found or {"nothing"}
    assert seen == {"old", "nothing"}
    assert count > 4
    expected = dict.fromkeys(KINDS[new], "new")
    del expected["tokenizer.json"]
    assert everything(folder) == expected
    assert (folder / "tokenizer.json").read_text() == "new"


def test_what_is_no_export_of_the_folder_stays(tmp_path: Path) -> None:
    """`merged` without an adapter beside it is a model like any other."""
    others = ["metrics.jsonl", "checkpoints/latest", *(f"merged/{name}" for name in MODEL)]
    folder = write(tmp_path / "output", [*MODEL, *others], "old")
    publish(write(tmp_path / "staging", MODEL, "new"), folder, last="config.json")
    assert {name: (folder / name).read_text() for name in others} == dict.fromkeys(others, "old")
