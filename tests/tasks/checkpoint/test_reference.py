"""Upstream's own output, for every case that is not marked as wrong: same files, keys, shapes, values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_llm.tasks.checkpoint import model, rules
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
    cases = [case for case in spec["cases"] if not case["suspect"]]
    for number, case in enumerate(cases):
        expect_case(case, source, tmp_path / f"mg{number}")
    assert cases


def expect_case(case: dict, source: Path, output: Path) -> None:
    """Convert as a case says, and compare files, keys, shapes, dtypes and hashes."""
    toys.run(source, output, *case["flags"])
    found = {
        path: {key: toys.summary(value) for key, value in tensors.items()}
        for path, tensors in toys.read_mg(output).items()
    }
    assert sorted(found) == sorted(case["files"]), case["flags"]
    for path, expected in case["files"].items():
        assert found[path] == expected, (case["flags"], path)


# One deliberate fault for each kind of rule: what is patched, the fault, and a family whose reference shows it.


def _swapped(first: int, second: int):
    def fault(original):
        def place(self, parts, share):
            parts = list(parts)
            if len(parts) > max(first, second):
                parts[first], parts[second] = parts[second], parts[first]
            return original(self, parts, share)

        return place

    return fault


def _reversed_experts(original):
    return lambda topology, rank, count: list(reversed(original(topology, rank, count)))


def _last_rank_first(original):
    return lambda self, part, axis: original(replace(self, index=self.count - 1 - self.index), part, axis)


def _no_vocabulary_split(original):
    return lambda self, parts, share: original(self, parts, replace(share, index=0))


MUTANTS = {
    "QKV: key and value swapped": (rules.GroupedQkv, "place", _swapped(1, 2), "llama2"),
    "QKV of packed weights and biases": (rules.GroupedQkv, "place", _swapped(1, 2), "phi3.5"),
    "gate and up swapped": (rules.Joined, "place", _swapped(0, 1), "qwen3"),
    "gate and up of stacked experts swapped": (rules.StackedExperts, "place", _swapped(0, 1), "qwen3-moe"),
    "MLA: query and latent swapped": (rules.Joined, "place", _swapped(0, 1), "deepseek2-lite"),
    "experts in reverse order": (model, "expert_range", _reversed_experts, "qwen2-moe"),
    "TP ranks in reverse order": (rules.Share, "of", _last_rank_first, "mamba2"),
    "every rank has the first rows of the vocabulary": (rules.Vocabulary, "place", _no_vocabulary_split, "gemma2"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_in_a_rule_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, fault, family = MUTANTS[name]
    spec = toys.reference(family)
    source = toys.save_hf(tmp_path / "hf", spec["hf_config"], toys.weights(spec))
    monkeypatch.setattr(owner, attribute, fault(getattr(owner, attribute)))
    cases = [case for case in spec["cases"] if not case["suspect"]]
    with pytest.raises(AssertionError):
        for number, case in enumerate(cases):
            expect_case(case, source, tmp_path / f"mg{number}")
