"""A checkpoint that was merged offline equals what the run itself exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.merge_dcp_to_hf import main
from tests.support.pool import RankPool
from tests.support.runs import exported, save_model, text_data, write_config, write_texts
from tests.support.toys import save_toy

pytestmark = pytest.mark.distributed
STEPS = 2


def run(
    pool: RankPool, folder: Path, toy: str, ranks: int, *, dtype: torch.dtype = torch.float32, **fields: Any
) -> tuple[Path, Path, Path]:
    """Train for two steps; (model directory, output directory, checkpoint of the last step)."""
    model = save_toy(toy, save_model(folder / "model", toy), dtype=dtype)
    data = text_data(write_texts(folder / "data.jsonl", 20))
    output = folder / "output"
    argv = [write_config(output, model, data, **{"stage": "pt", "max_steps": STEPS, "save_steps": STEPS, **fields})]
    pool.run("tests.docs.rows:train_in", ranks=ranks, folder=str(folder), argv=argv)
    return model, output, output / "checkpoints" / f"global_step_{STEPS}"


def assert_same_directory(found: Path, expected: Path) -> None:
    """Same tensors (bits and types) and same files beside them."""
    tensors, wanted = exported(found), exported(expected)
    assert wanted and tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    beside = {path.name for path in found.iterdir()} - {path.name for path in found.glob("model*")}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= beside
    for name in beside:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


HSDP = {"parallel": {"fsdp_size": 2}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("toy", "ranks", "fields", "dtype"),
    [
        ("llama", 2, {}, torch.float32),
        ("llama_uneven", 4, {}, torch.float16),
        ("llama_tied", 2, {"save_only_model": True}, torch.bfloat16),
        ("llama_tied", 4, HSDP, torch.float32),
        ("qwen3_moe", 2, {"hf_export_dtype": "bf16"}, torch.float32),
        ("qwen3_moe", 4, {**HSDP, "save_async": True}, torch.bfloat16),
    ],
)
def test_equals_the_export_of_the_run(
    rank_pool: RankPool, tmp_path: Path, toy: str, ranks: int, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    model, output, checkpoint = run(rank_pool, tmp_path, toy, ranks, dtype=dtype, **fields)
    # The weights of the source have changed: what follows does not compare them with themselves.
    source = load_file(model / "model.safetensors")
    assert any(not torch.equal(tensor, source[name]) for name, tensor in exported(output).items())

    assert main(["--load-dir", str(checkpoint)]) == 0
    merged = checkpoint / "hf_ckpt"
    assert_same_directory(merged, output)
    _, report = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    # The checkpoint is still whole, and merging again, here into several files, replaces the result.
    size = sum(tensor.nbytes for tensor in exported(merged).values())
    assert main(["--load-dir", str(checkpoint), "--shard-size", str(size // 3)]) == 0
    assert len(list(merged.glob("*.safetensors"))) > 1 and not (merged / "model.safetensors").exists()
    assert_same_directory(merged, output)


def test_names_types_and_files_of_another_model_directory(rank_pool: RankPool, tmp_path: Path) -> None:
    model, output, checkpoint = run(rank_pool, tmp_path, "qwen3_moe", 2, dtype=torch.bfloat16)
    moved = tmp_path / "moved"
    shutil.move(model, moved)
    arguments = ["--load-dir", str(checkpoint), "--model-configs", str(moved)]
    assert main([*arguments, "--save-dir", str(tmp_path / "a")]) == 0
    assert_same_directory(tmp_path / "a", output)
    assert main([*arguments, "--save-dir", str(tmp_path / "b"), "--dtype", "fp32"]) == 0
    wide = exported(tmp_path / "b")
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    for name, tensor in exported(output).items():
        assert torch.equal(wide[name].to(torch.bfloat16), tensor), name
    # Without weights: their names follow from the family, the type stands in config.json.
    (moved / "model.safetensors").unlink()
    assert main([*arguments, "--save-dir", str(tmp_path / "c")]) == 0
    assert_same_directory(tmp_path / "c", output)
    # With an index alone, the names are those that it has.
    write_index(moved, dict.fromkeys(exported(output), "model-00001-of-00001.safetensors"))
    assert main([*arguments, "--save-dir", str(tmp_path / "d")]) == 0
    assert_same_directory(tmp_path / "d", output)


@pytest.mark.parametrize("fields", [{}, HSDP], ids=["weights over both nodes", "a replica on each node"])
def test_nodes_with_disks_of_their_own(
    rank_pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any]
) -> None:
    model = save_model(tmp_path / "model", "llama")
    data = text_data(write_texts(tmp_path / "data.jsonl", 20), manager="lf")
    config = write_config(
        tmp_path / "run", model, data, stage="pt", max_steps=STEPS, save_steps=STEPS, **{"parallel": {}, **fields}
    )
    argv = [config, "--training.output_dir", str(tmp_path / "node_{node}")]
    results = rank_pool.run("tests.distributed.runs:train", ranks=4, argv=argv, nodes=2)
    assert [result["error"] for result in results] == [None] * 4
    output = tmp_path / "node_0"  # the rank that exports runs on this node
    first, second = (tmp_path / f"node_{node}" / "checkpoints" / f"global_step_{STEPS}" for node in (0, 1))
    if fields:
        for checkpoint in (first, second):
            assert main(["--load-dir", str(checkpoint)]) == 0
            assert_same_directory(checkpoint / "hf_ckpt", output)
        return
    with pytest.raises(UserError, match=r"lacks __2_0.distcp, __3_0.distcp \(2 of 4 files with weights\)"):
        main(["--load-dir", str(first)])
    for path in second.glob("*.distcp"):
        shutil.copy(path, first)
    capsys.readouterr()
    assert main(["--load-dir", str(first)]) == 0
    assert "2 files come from other nodes" in capsys.readouterr().out
    assert_same_directory(first / "hf_ckpt", output)


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    content = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(content)
