"""An export takes the place of earlier ones of every kind, on plain files; with weights in train/test_adapters.py."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

from mindspeed_llm.fsdp2.checkpoint.publish import publish, warn_of_replaced
from mindspeed_llm.fsdp2.config import Config, DataConfig, ModelConfig, TrainingConfig

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


def test_nothing_is_left_of_a_merged_model(tmp_path: Path) -> None:
    """Neither what transformers itself writes beside a model, nor the folder; a file of somebody else's stays."""
    for name, others in (("alone", []), ("with", ["merged/notes.txt"])):
        folder = write(tmp_path / name, [*KINDS["merged"], *others], "old")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
        tokenizer.chat_template = "{{ messages }}"
        tokenizer.save_pretrained(folder / "merged")
        GenerationConfig().save_pretrained(folder / "merged")
        assert len(list((folder / "merged").iterdir())) > 6
        publish(write(tmp_path / f"{name}.staging", MODEL, "new"), folder, last="config.json")
        assert [f"merged/{path.name}" for path in folder.glob("merged/*")] == others
        assert (folder / "merged").exists() == bool(others)


def test_a_run_says_what_its_export_will_replace(tmp_path: Path) -> None:
    def warning(kind: str | None, *, adapters: bool = False, **training: Any) -> str:
        folder = tmp_path / (kind or "empty")
        write(folder, ["metrics.jsonl", *(KINDS[kind] if kind else ())], "old")
        config = Config(
            model=ModelConfig(model_name_or_path="m", lora_rank=4 if adapters else None),
            data=DataConfig(dataset={"file_name": "a.jsonl"}),
            training=TrainingConfig(output_dir=str(folder), **training),
        )
        return warn_of_replaced(config) or ""

    assert warning(None) == warning("model", save_hf_weights=False) == ""
    for adapters in (False, True):
        line = warning("model", adapters=adapters)
        assert f"output_dir = '{tmp_path}/model' holds" in line and "config.json, model.safetensors will be" in line
        assert "adapter_config.json, adapter_model.safetensors will be removed" in warning("adapter", adapters=adapters)
        line = warning("merged", adapters=adapters)
        assert "adapter_config.json, adapter_model.safetensors, merged/config.json, " in line and "1 more" in line
    # A folder of that name that is no merged model is replaced by a merged model alone.
    write(tmp_path / "empty" / "merged", MODEL, "old")
    assert warning(None) == warning(None, adapters=True) == ""
    assert "merged/model.safetensors" in warning(None, adapters=True, merge_adapter=True)
