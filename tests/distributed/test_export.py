"""A model that was loaded, sharded and not changed comes out as it went in; a model from scratch is the same
everywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.pool import RankPool
from tests.support.toys import save_toy

pytestmark = pytest.mark.distributed
ROW = "tests.distributed.rows"


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, read with safetensors alone."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# toy, ranks, several input files, meta, dtype, several output files
@pytest.mark.parametrize(
    ("toy", "ranks", "sharded_input", "meta", "dtype", "sharded_output"),
    [
        ("llama", 1, False, False, torch.float32, False),
        ("llama", 2, True, True, torch.bfloat16, True),
        ("llama_tied", 1, True, True, torch.bfloat16, False),
        ("llama_tied", 2, False, False, torch.float32, True),
        ("llama_uneven", 2, False, True, torch.float16, False),
        ("qwen3_moe", 2, True, True, torch.bfloat16, True),
        ("qwen3_moe", 1, False, False, torch.float32, False),
        ("mixtral", 2, True, True, torch.bfloat16, True),
        ("gemma", 2, False, True, torch.bfloat16, False),
    ],
)
def test_unchanged_weights_come_out_as_they_went_in(
    rank_pool: RankPool,
    tmp_path: Path,
    toy: str,
    ranks: int,
    sharded_input: bool,
    meta: bool,
    dtype: torch.dtype,
    sharded_output: bool,
) -> None:
    source = save_toy(toy, tmp_path / "in", dtype=dtype, **({"max_shard_size": "60KB"} if sharded_input else {}))
    assert (len(list(source.glob("*.safetensors"))) > 1) == sharded_input
    output = tmp_path / "out"
    sections = {
        "model": {"init_model_with_meta_device": meta},
        "training": {"hf_shard_size": 60_000 if sharded_output else 5_000_000_000},
    }
    rank_pool.run(f"{ROW}:export", ranks=ranks, folder=str(source), output=str(output), sections=sections)
    files = sorted(path.name for path in output.iterdir())
    assert (len([name for name in files if name.endswith(".safetensors")]) > 1) == sharded_output
    assert not [name for name in files if name.startswith(".")]
    assert_same_tensors(read_all(output), read_all(source))
    if sharded_output:
        index = json.loads((output / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == read_all(source).keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_all(source).values())
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, output))
    assert after == before
    # transformers' own loader agrees that nothing is missing and nothing is left over.
    _, report = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]


def test_a_step_with_a_learning_rate_does_change_the_export(rank_pool: RankPool, tmp_path: Path) -> None:
    """The comparison above can fail: other weights give another directory."""
    one, two = save_toy("llama", tmp_path / "one", seed=0), save_toy("llama", tmp_path / "two", seed=1)
    rank_pool.run(f"{ROW}:export", ranks=1, folder=str(one), output=str(tmp_path / "out"), sections={})
    with pytest.raises(AssertionError):
        assert_same_tensors(read_all(tmp_path / "out"), read_all(two))


def test_a_second_export_leaves_no_stale_files(rank_pool: RankPool, tmp_path: Path) -> None:
    source = save_toy("llama", tmp_path / "in")
    arguments: dict[str, Any] = {"folder": str(source), "output": str(tmp_path / "out"), "train_step": False}
    small = {"training": {"hf_shard_size": 60_000}}
    rank_pool.run(f"{ROW}:export", ranks=1, sections=small, **arguments)
    rank_pool.run(f"{ROW}:export", ranks=1, sections={}, **arguments)
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("toy", ["llama", "llama_tied", "qwen3_moe", "gemma3_text"])
def test_weights_from_scratch_do_not_depend_on_the_topology(rank_pool: RankPool, tmp_path: Path, toy: str) -> None:
    folder = save_toy(toy, tmp_path / "in")

    def start(ranks: int, meta: bool, **sections: Any) -> dict[str, Any]:
        model = {"train_from_scratch": True, "init_model_with_meta_device": meta}
        return rank_pool.run(
            f"{ROW}:initial_weights", ranks=ranks, folder=str(folder), sections={"model": model, **sections}
        )[0]

    single = start(1, meta=False)
    for other in (start(2, meta=True), start(4, meta=True, parallel={"fsdp_size": 2})):
        assert other["weights"].keys() == single["weights"].keys()
        for name, tensor in single["weights"].items():
            assert torch.equal(other["weights"][name], tensor), name
    other_seed = start(1, meta=False, training={"seed": 7})["weights"]
    assert not torch.equal(other_seed["model.embed_tokens.weight"], single["weights"]["model.embed_tokens.weight"])
    # The distribution is the one of the model's class: normal with initializer_range, norms at one (Gemma: at zero).
    weights = single["weights"]
    matrices = torch.cat([t.flatten() for t in weights.values() if t.ndim > 1])
    assert abs(matrices.std().item() - 0.02) < 5e-4 and abs(matrices.mean().item()) < 2e-4
    norm = weights["model.norm.weight"]
    assert torch.equal(norm, torch.zeros_like(norm) if toy.startswith("gemma") else torch.ones_like(norm))
    layers = [weights[f"model.layers.{i}.self_attn.q_proj.weight"] for i in range(4)]
    assert not torch.equal(layers[0], layers[1])


@pytest.mark.parametrize("toy", ["llama", "gemma3_text", "qwen3_moe"])
def test_buffers_after_a_meta_build_are_those_of_transformers(rank_pool: RankPool, tmp_path: Path, toy: str) -> None:
    folder = save_toy(toy, tmp_path / "in")
    expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_buffers())
    found = rank_pool.run(
        f"{ROW}:initial_weights",
        ranks=2,
        folder=str(folder),
        sections={"model": {"init_model_with_meta_device": True}},
    )[1]["buffers"]
    assert found.keys() == expected.keys() and expected
    for name, buffer in expected.items():
        torch.testing.assert_close(found[name], buffer, rtol=0, atol=0)
