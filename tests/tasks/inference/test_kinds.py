"""What a path is taken for, and what is said of one that nothing can be loaded from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.manifest import Manifest, describe_file, write_manifest
from mindspeed_llm.tasks.inference.kinds import detect


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}", encoding="utf-8")
    return folder


def checkpoint(folder: Path) -> Path:
    """What the FSDP2 backend leaves, with a manifest that fits it."""
    touch(folder, ".metadata", "__0_0.distcp", "extra_state/extra_state_rank_0.pt")
    write_manifest(
        folder,
        Manifest(
            step=int(folder.name.split("_")[2].partition(".")[0]),
            has_optimizer=False,
            files={name: describe_file(folder / name) for name in (".metadata", "__0_0.distcp")},
            topology={"ranks": 1},
            progress={},
            versions={},
            config={},
        ),
    )
    return folder


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("hf", ["config.json", "model.safetensors"]),
        ("hf", ["config.json", "adapter_config.json"]),  # the loader says what is wrong with it
        ("peft", ["adapter_config.json", "adapter_model.safetensors"]),
        ("mcore", ["latest_checkpointed_iteration.txt"]),
        ("mcore", ["iter_0000020/mp_rank_00/model_optim_rng.pt"]),
        ("mcore", ["release/mp_rank_00/model_optim_rng.pt"]),
        ("mcore", ["mp_rank_00_001/model_optim_rng.pt", "manifest.json"]),
        ("mcore", ["common.pt", ".metadata", "metadata.json", "__0_0.distcp", "manifest.json"]),
    ],
)
def test_kinds_by_their_files(tmp_path: Path, kind: str, files: list[str]) -> None:
    source = detect(touch(tmp_path, *files))
    assert (source.kind, source.folder, source.notes) == (kind, tmp_path, ())


def test_a_run_of_training(tmp_path: Path) -> None:
    first, second, third = (checkpoint(tmp_path / "checkpoints" / f"global_step_{step}") for step in (2, 10, 9))
    assert detect(third).folder == third
    for path in (tmp_path, tmp_path / "checkpoints"):
        source = detect(path)
        assert (source.kind, source.folder, source.notes) == ("fsdp2", second, ("the newest whole one",))
    (second / "__0_0.distcp").write_text("longer", encoding="utf-8")
    source = detect(str(tmp_path))
    assert source.folder == third
    assert "skipped global_step_10, which is damaged" in source.description
    assert "__0_0.distcp" in source.description
    for folder in (first, third):
        (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"none of its checkpoints is whole: skipped global_step_10.*global_step_2"):
        detect(tmp_path)


def test_an_export_comes_before_the_checkpoints_beside_it(tmp_path: Path) -> None:
    checkpoint(tmp_path / "checkpoints" / "global_step_2")
    source = detect(touch(tmp_path, "config.json"))
    assert (source.kind, source.folder) == ("hf", tmp_path)
    assert str(tmp_path / "checkpoints") in source.description


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert detect("org/name").description == "org/name: a Hugging Face model; named by its hub id"
    touch(tmp_path / "org/name", "adapter_config.json")
    assert detect("org/name").kind == "peft"


def _file(folder: Path) -> Path:
    return touch(folder, "model.safetensors") / "model.safetensors"


def _damaged(folder: Path) -> Path:
    found = checkpoint(folder / "global_step_3")
    (found / "__0_0.distcp").unlink()
    return found


def _unfinished(folder: Path) -> Path:
    return touch(folder / "global_step_3.tmp", ".metadata", "__0_0.distcp")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "a" / "b", r"does not exist \(of it, .* exists.*Expected a Hugging Face"),
        (lambda folder: "~/model", "~ is not expanded here"),
        (lambda folder: " ", "is empty. Expected"),
        (_file, "is a file; expected the folder"),
        (lambda folder: folder, "is an empty folder. Expected"),
        (lambda folder: touch(folder, "notes.txt", "b.txt"), r"holds no model and no checkpoint \(it has b.txt, notes"),
        (lambda folder: _file(folder).parent, "holds weights without a config.json"),
        (_damaged, r"global_step_3 is damaged: .*__0_0.distcp.* is missing.*; name another"),
        (_unfinished, "a checkpoint that was never finished"),
        (lambda folder: _unfinished(folder).parent, "global_step_3.tmp was never finished"),
        (lambda folder: touch(folder / "global_step_4", ".metadata"), "it has no manifest.json"),
        (lambda folder: touch(folder / "iter_0000002.tmp", "common.pt"), "a checkpoint that was never finished"),
    ],
)
def test_what_is_refused(tmp_path: Path, make: Callable[[Path], Path | str], said: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)^--load .*{said}"):
        detect(make(tmp_path))
    with pytest.raises(UserError, match=r"^--model-path "):
        detect(make(tmp_path), flag="--model-path")


def test_needs_no_torch(tmp_path: Path) -> None:
    checkpoint(tmp_path / "checkpoints" / "global_step_2")
    code = (
        "import sys; from mindspeed_llm.tasks.inference.kinds import detect\n"
        f"assert detect({str(tmp_path)!r}).kind == 'fsdp2'\n"
        "assert detect('org/name').kind == 'hf'\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
