"""What a conversion says about itself: the report, the table at its end, the dry run, the progress."""

from __future__ import annotations

import json
import re
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import main as command
from mindspeed_llm.tasks.checkpoint import progress
from mindspeed_llm.tasks.checkpoint.dry_run import lines
from mindspeed_llm.tasks.checkpoint.prepare import prepare
from mindspeed_llm.tasks.checkpoint.progress import Progress
from mindspeed_llm.tasks.checkpoint.report import REPORT, table
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_layout import EP, PP, TP


def test_report(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3", tie_word_embeddings=True, vocab_size=500)
    weights = load_file(source / "model.safetensors")
    copy = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": copy}, source / "model.safetensors")
    found = toys.run(source, tmp_path / "mg", TP, "2", PP, "2", "--make-vocab-size-divisible-by", "128").report
    assert json.loads((tmp_path / "mg" / REPORT).read_text()) == found
    assert (found["direction"], found["family"]) == ("hf -> mg", "qwen3")
    assert found["topology"]["output"]["tp"] == found["topology"]["output"]["pp"] == 2
    # 4 layers of 11 tensors, embedding and final norm; of a layer, 4 norms are whole, o and down split, and q, k, v,
    # gate and up both.
    assert found["source"] == {
        "folder": str(source),
        "tensors": 47,
        "taken": 46,
        "taken_how": {"split": 4 * 2 + 1, "split and fused": 4 * 5, "whole": 4 * 4 + 1},
        "dropped": {"lm_head.weight": "a copy of model.embed_tokens.weight"},
    }
    output = found["output"]
    # On each of 4 ranks two layers of 8 tensors; embedding, final norm and the copy of the embedding on two each.
    assert output["tensors"] == 4 * 2 * 8 + 3 * 2 and output["dtypes"] == {"bfloat16": output["tensors"]}
    assert output["padded"] == ["model/embedding.word_embeddings.weight", "model/output_layer.weight"]
    assert output["bytes"] == sum(
        value.nbytes for tensors in toys.read_mg(tmp_path / "mg").values() for value in tensors.values()
    )
    ranks = [f"iter_0000001/mp_rank_0{tp}_00{pp}/model_optim_rng.pt" for tp in range(2) for pp in range(2)]
    assert sorted(output["files"]) == [*ranks, "latest_checkpointed_iteration.txt"]
    assert sum(output["files"][name]["tensors"] for name in ranks) == output["tensors"]
    assert found["flags"]["target"] == {"tp": 2, "pp": 2} and found["flags"]["verify"] == "sample"
    assert found["versions"]["torch"] == version("torch")
    assert 0 < found["seconds"] < 600 and found["cpu_seconds"] > 0
    assert found["gb_per_second"] == pytest.approx(output["bytes"] / 1e9 / found["seconds"], abs=2e-3)
    assert 10**7 < found["peak_anonymous_bytes"] < 10**10

    shown = table(found, tmp_path / "mg")
    for line in (
        "converted  qwen3, hf -> mg, into ",
        "read       47 tensors, 46 taken, 1 dropped",
        "how        9 split, 20 split and fused, 17 whole",
        "written    70 tensors (70 bfloat16), ",
        "verified   sample: names, shapes and values of 70 tensors, ",
        "dropped    lm_head.weight: a copy of model.embed_tokens.weight",
    ):
        assert f"\n{line}" in f"\n{shown}", shown


def test_report_of_a_megatron_source(tmp_path: Path) -> None:
    """Kinds are those of the Megatron side there, too."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    there = toys.run(source, tmp_path / "mg", TP, "2", PP, "2").report["source"]["taken_how"]
    back = toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf").report
    assert back["source"]["taken_how"] == there and back["direction"] == "mg -> hf"
    assert back["topology"].keys() == {"input"} and back["topology"]["input"]["tp"] == 2


def test_report_is_not_copied_along(tmp_path: Path) -> None:
    """A directory that was converted serves as --hf-cfg-dir."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg")
    toys.run(tmp_path / "mg", tmp_path / "one", of="mg", to="hf")
    toys.run(tmp_path / "mg", tmp_path / "two", "--hf-cfg-dir", str(tmp_path / "one"), of="mg", to="hf")
    assert json.loads((tmp_path / "two" / REPORT).read_text())["flags"]["hf_cfg_dir"] == str(tmp_path / "one")


# The dry run


def dry(source: Path, output: Path, *flags: str, of: str = "hf", to: str = "mg") -> list[str]:
    conversion = prepare(toys.request(source, output, *flags, of=of, to=to))
    found = list(lines(conversion.plan, conversion.loaded.source, conversion.model.hf_tensors()))
    return [" ".join(line.split()) for line in found]


def test_dry_run_names_shapes_and_parts(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3-moe")
    flags = [TP, "2", PP, "2", EP, "2", "--padded-vocab-size", "600"]
    found = dry(source, tmp_path / "mg", *flags)
    start = found.index("iter_0000001/mp_rank_01_001_001/model_optim_rng.pt: 32 tensors, 0.000 GB")
    of_rank = found[start + 1 :]
    for line in (
        "model/decoder.layers.{0-1}.input_layernorm.weight [48] bfloat16 <- model.layers.{2-3}.input_layernorm.weight "
        "[48]",
        "model/decoder.layers.{0-1}.self_attention.linear_qkv.weight [80, 48] bfloat16 <- "
        "model.layers.{2-3}.self_attn.q_proj.weight [96, 48] part [3:6, :, :] of [6, 16, 48]",
        "+ model.layers.{2-3}.self_attn.v_proj.weight [32, 48] part [1:2, :, :] of [2, 16, 48]",
        "model/decoder.layers.{0-1}.mlp.experts.local_experts.{0-3}.linear_fc2.weight [48, 12] bfloat16 <- "
        "model.layers.{2-3}.mlp.experts.{4-7}.down_proj.weight [48, 24] part [:, 12:24] of [48, 24]",
        "model/output_layer.weight [300, 48] bfloat16 padded <- "
        "lm_head.weight [512, 48] part [300:512, :] of [512, 48]",
    ):
        assert line in of_rank, line
    assert re.fullmatch(r"252 tensors, 0\.001 GB, 8 files; nothing was written \(--dry-run\)", found[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_dry_run_from_megatron(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg", TP, "2", PP, "2")
    found = dry(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    at = found.index(
        "model.layers.{2-3}.self_attn.k_proj.weight [32, 48] bfloat16 <- mp_rank_00_001 "
        "model/decoder.layers.{0-1}.self_attention.linear_qkv.weight [80, 48] part [0:1, :, :] of [2, 16, 48]"
    )
    assert found[at + 1].startswith("+ mp_rank_01_001 model/decoder.layers.{0-1}.self_attention.linear_qkv.weight")
    moved = dry(tmp_path / "mg", tmp_path / "moved", of="mg", to="mg")
    assert any("linear_qkv.weight (model.layers.{2-3}.self_attn.k_proj.weight) [80, 48]" in line for line in moved)


def test_dry_run_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3", tie_word_embeddings=True)
    weights = load_file(source / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.zeros(512, 48)}, source / "model.safetensors")
    command.main(["--load-dir", str(source), "--save-dir", str(tmp_path / "mg"), "--dry-run"])
    *_, dropped, end = capsys.readouterr().out.splitlines()
    assert dropped == "not converted: lm_head.weight: a copy of model.embed_tokens.weight"
    assert end.endswith("1 files; nothing was written (--dry-run)") and not (tmp_path / "mg").exists()
    with pytest.raises(UserError, match="use --num-layer-list 2,1,1"):
        command.main(["--load-dir", str(source), "--save-dir", str(tmp_path / "mg"), "--dry-run", PP, "3"])


# Progress


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_BAR_EVERY_S", 0.0)
    with Progress(bar=True) as counted:
        counted.begin("converted", 4 * 10**9)
        counted._began = time.monotonic() - 2
        counted.add(10**9)
    shown = capsys.readouterr().err.split("\r")
    assert shown[-2].startswith(f"|{'#' * 8}{' ' * 22}| converted  25%, 1.00 of 4.00 GB, 0.50 GB/s, ETA 0:06")
    assert shown[-1] == "\x1b[K"


def test_progress_in_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain lines, not more often than every few seconds."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress(bar=False) as counted:
        counted.begin("converted", 100 * 10**9)
        for _ in range(100):
            now[0] += 1.0
            counted.add(10**7)
        counted.begin("waiting for the disk")
    captured = capsys.readouterr()
    found = captured.out.splitlines()
    assert len(found) == 10 and not captured.err
    assert found[0] == "converted   0%, 0.10 of 100.00 GB, 0.01 GB/s, ETA 2:46:30"
    assert found[-1] == "converted   1%, 1.00 of 100.00 GB, 0.01 GB/s, ETA 2:45:00"


def test_peak_memory_is_seen() -> None:
    counted = Progress(show=False)
    assert counted.peak_anonymous_bytes is not None
    before = counted.peak_anonymous_bytes
    held = torch.ones(2**26)  # 256 MB
    counted.begin("held")
    del held
    counted.begin("freed")
    assert counted.peak_anonymous_bytes > before + 2**27
