"""The planned peak memory against measured runs, and the parts of a plan by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.fsdp2.models.model_factory import build_on_meta, load_model_config
from mindspeed_llm.fsdp2.models.trainable import choose_trainable
from mindspeed_llm.fsdp2.plan.memory import MemoryPlan, plan_memory
from tests.distributed.rows import toy_config
from tests.support.toys import save_toy

FP32 = {"param_dtype": "fp32"}
ONE: dict[str, Any] = {"training": {"per_device_train_batch_size": 1}}
SHORT: dict[str, Any] = {"data": {"cutoff_len": 256}}
# family, ranks, sections
ROWS: list[Any] = [
    ("llama", 1, {"parallel": FP32, "training": {"per_device_train_batch_size": 2}}),
    # Half of the tokens: CPUs without bf16 units are slow.
    ("llama", 1, {**ONE, "parallel": {"param_dtype": "bf16", "recompute": True}, **SHORT}),
    (
        "llama",
        1,
        {"parallel": FP32, "training": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}, **SHORT},
    ),
    ("qwen3_moe", 1, {"parallel": FP32, "training": {"per_device_train_batch_size": 2}}),
    pytest.param(
        "llama",
        2,
        {"parallel": FP32, "training": {"per_device_train_batch_size": 3}, **SHORT},
        marks=pytest.mark.torchrun,
    ),
]


def measure(folder: Path, repository: Path, family: str, ranks: int, sections: dict[str, Any]) -> list[dict[str, Any]]:
    """What `tests.fsdp2.plan.measure` writes on every rank."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
    arguments = [str(folder), json.dumps({"family": family, "sections": sections})]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_NUM_THREADS": "1", "MINDSPEED_DEVICE": "cpu"}
    done = subprocess.run(
        [*launcher, "tests.fsdp2.plan.measure", *arguments],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"measured_{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.sampled(5)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures resident memory on Linux")
@pytest.mark.parametrize(("family", "ranks", "sections"), ROWS)
def test_the_planned_peak_is_near_the_measured_one(
    tmp_path: Path, repository: Path, family: str, ranks: int, sections: dict[str, Any]
) -> None:
    for rank, found in enumerate(measure(tmp_path, repository, family, ranks, sections)):
        assert found["reason"] is None
        ratio = found["planned"] / found["measured"]
        assert 0.8 < ratio < 1.2, f"rank {rank}: planned / measured = {ratio:.3f}: {found}"


# --- By hand

# Llama toy: 4 layers, embedding and head are groups; the last norm stays with the root.
EMBEDDING = 509 * 48
LAYER = 48 * (6 * 16) + 2 * 48 * (2 * 16) + (6 * 16) * 48 + 3 * 48 * 88 + 2 * 48
TOTAL = 2 * EMBEDDING + 4 * LAYER + 48


def plan(tmp_path: Path, *, shards: int, **sections: Any) -> MemoryPlan:
    config = toy_config(str(save_toy("llama", tmp_path)), data={"cutoff_len": 32}, **sections)
    model = build_on_meta(config, load_model_config(config.model))
    choose_trainable(model, config.model)
    found, reason = plan_memory(model, config, shards=shards)
    assert reason is None
    return found


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_shards_of_weights_gradients_and_moments(tmp_path: Path, shards: int) -> None:
    found = plan(tmp_path, shards=shards)
    local = -(-TOTAL // shards)
    assert (found.weights, found.gradients, found.optimizer) == (4 * local, 4 * local, 8 * local)
    # The two neighbours with the most weights (one is gathered ahead), and the root's norm.
    assert found.gathered == 4 * (max(EMBEDDING + LAYER, 2 * LAYER) + 48)
    assert found.in_flight == (4 + 4) * max(EMBEDDING, LAYER)


# Rank 3 on all linear layers of one layer but the norms: inputs + outputs of q, k, v, o, gate, up and down.
ADAPTERS = 3 * ((48 + 96) + 2 * (48 + 32) + (96 + 48) + 2 * (48 + 88) + (88 + 48))


@pytest.mark.parametrize("shards", [1, 3])
def test_adapters_alone_have_gradients_and_moments(tmp_path: Path, shards: int) -> None:
    found = plan(tmp_path, shards=shards, model={"lora_rank": 3})
    trained = -(-4 * ADAPTERS // shards)
    assert found.weights == 4 * -(-(TOTAL + 4 * ADAPTERS) // shards)
    assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)
    assert found.in_flight == (4 + 4) * ADAPTERS
    assert found.activations is not None


def test_frozen_modules_have_neither(tmp_path: Path) -> None:
    found = plan(tmp_path, shards=1, model={"freeze_modules": ["model.embed_tokens", "model.layers.{0-2}"]})
    trained = EMBEDDING + LAYER + 48
    assert (found.weights, found.gradients, found.optimizer) == (4 * TOTAL, 4 * trained, 8 * trained)


def test_a_reference_model_is_a_second_set_of_weights_and_pairs_are_two_rows(tmp_path: Path) -> None:
    rows = {"per_device_train_batch_size": 2}
    sft = plan(tmp_path / "a", shards=1, training={"per_device_train_batch_size": 4})
    dpo = plan(tmp_path / "b", shards=1, training={**rows, "stage": "dpo"})
    assert (dpo.weights, dpo.gradients, dpo.optimizer) == (2 * sft.weights, sft.gradients, sft.optimizer)
    assert dpo.activations == sft.activations
    lora = plan(tmp_path / "c", shards=1, training={**rows, "stage": "dpo"}, model={"lora_rank": 3})
    assert lora.weights == 4 * (TOTAL + 4 * ADAPTERS)  # the model without its adapters is the reference


def test_half_precision_gathers_half(tmp_path: Path) -> None:
    found = plan(tmp_path, shards=2, parallel={"param_dtype": "bf16"})
    assert found.gathered == 2 * (max(EMBEDDING + LAYER, 2 * LAYER) + 48)
    assert found.in_flight == (2 + 4) * max(EMBEDDING, LAYER)
    assert found.weights == 4 * -(-TOTAL // 2)


def test_accumulation_keeps_whole_gradients(tmp_path: Path) -> None:
    assert plan(tmp_path, shards=2, training={"gradient_accumulation_steps": 2}).in_flight == 4 * TOTAL


def test_without_resharding_everything_stays_gathered(tmp_path: Path) -> None:
    assert plan(tmp_path, shards=2, parallel={"reshard_after_forward": False}).gathered == 4 * TOTAL


def test_ignored_modules_are_whole_on_every_rank(tmp_path: Path) -> None:
    found = plan(tmp_path, shards=4, parallel={"ignored_modules": ["lm_head"], "fsdp_modules": ["model.layers.{*}"]})
    assert found.weights == 4 * (-(-(TOTAL - EMBEDDING) // 4) + EMBEDDING)


def test_recomputation_and_half_precision_save_activations(tmp_path: Path) -> None:
    whole = plan(tmp_path / "a", shards=1).activations.alone
    recomputed = plan(tmp_path / "b", shards=1, parallel={"recompute": True}).activations.alone
    half = plan(tmp_path / "c", shards=1, parallel={"param_dtype": "bf16"}).activations.alone
    assert recomputed < 0.6 * whole
    # Logits are turned into fp32 for the loss, whatever the compute dtype.
    assert 0.4 * whole < half < 0.9 * whole


def test_activations_grow_with_the_micro_batch_and_hold_at_least_the_logits(tmp_path: Path) -> None:
    peaks = [
        plan(tmp_path / str(rows), shards=1, training={"per_device_train_batch_size": rows}).activations.alone
        for rows in (2, 4)
    ]
    assert 1.9 < peaks[1] / peaks[0] < 2.1
    logits = 2 * 32 * 509 * 4
    assert peaks[0] > 2 * logits  # the logits and their gradient
