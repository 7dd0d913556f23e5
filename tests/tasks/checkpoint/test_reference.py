"""Upstream's own output, for every case that is not marked as wrong: same files, keys, shapes, values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasks.checkpoint import toys

FAMILIES = [
    "deepseek2-lite",
    "deepseek3",
    "gemma2",
    "glm45-air",
    "llama2",
    "mamba2",
    "minimax_m2",
    "phi3.5",
    "qwen2-moe",
    "qwen25",
    "qwen3",
    "qwen3-moe",
    "qwen3-next",
]
pytestmark = [
    pytest.mark.real_data,
    pytest.mark.skipif(not toys.REFERENCE.is_dir(), reason=f"no reference files at {toys.REFERENCE}"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_upstream(family: str, tmp_path: Path) -> None:
    spec = toys.reference(family)
    source = toys.save_hf(tmp_path / "hf", spec["hf_config"], toys.weights(spec))
    compared = 0
    for number, case in enumerate(spec["cases"]):
        if case["suspect"]:
            continue
        output = tmp_path / f"mg{number}"
        toys.run(source, output, *case["flags"])
        found = {
            path: {key: toys.summary(value) for key, value in tensors.items()}
            for path, tensors in toys.read_mg(output).items()
        }
        assert sorted(found) == sorted(case["files"]), case["flags"]
        for path, expected in case["files"].items():
            assert found[path] == expected, (case["flags"], path)
        compared += 1
    assert compared
