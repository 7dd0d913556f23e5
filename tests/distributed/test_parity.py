"""Training through FSDP equals a plain transformers loop, step by step, for any split of the batch and of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool
from tests.support.reference import Trace, assert_parity, make_samples, train_reference
from tests.support.toys import TOYS, save_toy

pytestmark = pytest.mark.distributed
STEPS = 8
GLOBAL_BATCH = 8
ROW = "tests.distributed.rows:train"


class Case:
    """One toy on disk with its samples and the reference's trace."""

    def __init__(self, toy: str, folder: Path) -> None:
        self.folder = str(save_toy(toy, folder))
        vocabulary = TOYS[toy]["vocab_size"]
        self.samples = make_samples(count=STEPS * GLOBAL_BATCH, vocabulary=vocabulary)
        self.reference = train_reference(Path(self.folder), self.samples, steps=STEPS, global_batch=GLOBAL_BATCH)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Cases by toy, made once."""
    made: dict[str, Case] = {}

    def case(toy: str) -> Case:
        if toy not in made:
            made[toy] = Case(toy, tmp_path_factory.mktemp(toy) / "model")
        return made[toy]

    return case


def split(ranks: int, micro: int, accumulation: int, **parallel: Any) -> dict[str, Any]:
    """The sections for a split of the global batch of 8."""
    assert ranks * micro * accumulation == GLOBAL_BATCH
    return {
        "training": {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation},
        "parallel": parallel,
    }


def run(rank_pool: RankPool, case: Case, ranks: int, sections: dict[str, Any], **options: Any) -> Trace:
    rows = rank_pool.run(
        ROW, ranks=ranks, folder=case.folder, samples=case.samples, steps=STEPS, sections=sections, **options
    )
    traces = [row["trace"] for row in rows]
    assert all(t.losses == traces[0].losses and t.grad_norms == traces[0].grad_norms for t in traces)
    return traces[0]


# toy, ranks, fsdp_size, meta, recompute
ROWS = [
    ("llama", 1, None, False, False),
    ("llama", 1, None, True, True),
    ("llama", 2, None, True, False),
    ("llama", 2, 1, True, False),
    ("llama", 4, None, False, True),
    ("llama", 4, 2, True, False),
    ("llama_tied", 2, None, True, False),
    ("llama_tied", 4, 2, False, True),
    ("llama_uneven", 2, None, True, False),
    ("llama_uneven", 4, None, True, True),
    ("llama_odd3", 2, None, True, False),
    ("qwen3", 1, None, True, False),
    ("qwen3", 2, None, False, True),
    ("qwen3", 4, 2, True, True),
    ("qwen3_moe", 1, None, False, False),
    ("qwen3_moe", 2, None, True, True),
    ("qwen3_moe", 4, None, True, False),
    ("qwen3_moe", 4, 2, False, False),
    ("mixtral", 2, None, True, False),
    ("gemma", 1, None, True, True),
    ("gemma", 2, None, True, False),
    ("gemma", 4, 2, True, False),
    ("gemma3_text", 2, None, True, True),
]


@pytest.mark.parametrize(
    ("toy", "ranks", "fsdp_size", "meta", "recompute"),
    [*ROWS[:6], *(pytest.param(*row, marks=pytest.mark.sampled(2)) for row in ROWS[6:])],
)
def test_training_equals_transformers(
    rank_pool: RankPool, cases: Any, toy: str, ranks: int, fsdp_size: int | None, meta: bool, recompute: bool
) -> None:
    sections = split(ranks, GLOBAL_BATCH // ranks, 1, fsdp_size=fsdp_size, recompute=recompute)
    sections["model"] = {"init_model_with_meta_device": meta}
    case = cases(toy)
    assert_parity(run(rank_pool, case, ranks, sections), case.reference)


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 8, 1), (1, 2, 4), (2, 2, 2), (4, 1, 2)])
def test_the_split_of_the_global_batch_changes_nothing(
    rank_pool: RankPool, cases: Any, ranks: int, micro: int, accumulation: int
) -> None:
    case = cases("qwen3")
    found = run(rank_pool, case, ranks, split(ranks, micro, accumulation))
    assert_parity(found, case.reference)


@pytest.mark.parametrize(
    ("toy", "ranks", "parallel"),
    [
        ("llama", 2, {"reshard_after_forward": False}),
        ("llama", 2, {"ignored_modules": ["model.norm", "model.layers.{1-2}.mlp"]}),
        ("llama", 4, {"ignored_modules": ["lm_head"], "fsdp_size": 2, "fsdp_modules": ["model.layers.{*}"]}),
        ("llama", 2, {"shard_placement_fn": "shard_by_dim_1"}),
        ("llama", 2, {"fsdp_modules": ["model.layers.{*}", "model.layers.{*}.mlp"], "num_to_forward_prefetch": 2}),
        ("llama_tied", 2, {"fsdp_modules": ["model.layers.{*}"], "num_to_backward_prefetch": 0}),
        ("qwen3", 2, {"recompute": True, "recompute_modules": ["model.layers.{*}.mlp", "model.layers.0.self_attn"]}),
    ],
)
def test_ways_of_sharding_change_nothing(
    rank_pool: RankPool, cases: Any, toy: str, ranks: int, parallel: dict[str, Any]
) -> None:
    case = cases(toy)
    sections = split(ranks, GLOBAL_BATCH // ranks // 2, 2, **parallel)
    assert_parity(run(rank_pool, case, ranks, sections), case.reference)


@pytest.mark.parametrize("toy", ["llama", "qwen3_moe", "gemma3_text"])
def test_fused_operators_change_nothing(rank_pool: RankPool, cases: Any, toy: str) -> None:
    case = cases(toy)
    sections = split(2, 4, 1)
    sections["optimization"] = {
        "use_fused_rmsnorm": True,
        "use_fused_rotary_pos_emb": True,
        "use_flash_attn": True,
        "moe_grouped_gemm": toy == "qwen3_moe",
    }
    assert_parity(run(rank_pool, case, 2, sections), case.reference)


def test_backends_that_only_sum_give_the_same_average(rank_pool: RankPool, cases: Any) -> None:
    case = cases("llama")
    found = run(rank_pool, case, 4, split(4, 1, 2, fsdp_size=2), sum_only=True)
    assert_parity(found, case.reference)


def test_fused_adamw_equals_adamw(rank_pool: RankPool, cases: Any) -> None:
    case = cases("llama")
    sections = split(2, 4, 1)
    sections["training"]["optimizer"] = "fused_adamw"
    assert_parity(run(rank_pool, case, 2, sections), case.reference)


def test_micro_batches_without_targets_add_nothing(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = save_toy("llama", tmp_path / "model")
    samples = make_samples(count=16, vocabulary=509, no_target_every=2)
    # The reference never sees the samples without targets: their gradient is zero, not NaN and not a share of the mean.
    with_targets = [sample for sample in samples if any(label != -100 for label in sample[1])]
    reference = train_reference(folder, with_targets, steps=2, global_batch=4, one_by_one=True)
    rows = rank_pool.run(
        ROW, ranks=2, folder=str(folder), samples=samples, steps=2, sections=split(2, 1, 4, recompute=True)
    )
    assert_parity(rows[0]["trace"], reference)


def test_a_global_batch_without_targets_changes_nothing(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = save_toy("llama", tmp_path / "model")
    samples = make_samples(count=24, vocabulary=509)
    empty = [(ids, [-100] * len(ids)) for ids, _ in samples[8:16]]
    sections = split(2, 2, 2)
    kept = rank_pool.run(
        ROW, ranks=2, folder=str(folder), samples=samples[:8] + empty + samples[16:], steps=3, sections=sections
    )[0]
    assert kept["updated"] == [True, False, True]
    reference = train_reference(folder, samples[:8] + samples[16:], steps=2, global_batch=8)
    trace = kept["trace"]
    assert trace.losses[1] == 0.0
    del trace.losses[1], trace.grad_norms[1]
    assert_parity(trace, reference)


def test_collectives_do_not_grow_with_accumulation(rank_pool: RankPool, cases: Any) -> None:
    case = cases("llama")

    def counts(ranks: int, accumulation: int, **parallel: Any) -> dict[str, int]:
        sections = split(ranks, GLOBAL_BATCH // ranks // accumulation, accumulation, **parallel)
        rows = rank_pool.run(
            ROW,
            ranks=ranks,
            folder=case.folder,
            samples=case.samples,
            steps=2,
            sections=sections,
            count_collectives=True,
        )
        return {name: number for name, number in rows[0]["collectives"][1].items() if "barrier" not in name}

    once = counts(2, 1)
    # One reduction per group (4 layers, embedding, head, root) and three small sums: targets, losses, gradient norm.
    assert sum(number for name, number in once.items() if "reduce_scatter" in name) == 7
    assert sum(number for name, number in once.items() if "allreduce" in name) == 3
    for accumulation in (2, 4):
        many = counts(2, accumulation)
        reductions = {name: number for name, number in many.items() if "gather" not in name}
        assert reductions == {name: number for name, number in once.items() if "gather" not in name}
    # Parameters that stay gathered between micro steps: not even the gathering grows.
    assert counts(2, 4, reshard_after_forward=False) == counts(2, 1, reshard_after_forward=False)
    replicated = counts(4, 1, fsdp_size=2)
    assert counts(4, 2, fsdp_size=2)["allreduce"] == replicated["allreduce"] == 3 + 7


@pytest.mark.parametrize(
    ("mutant", "toy", "ranks", "fsdp_size"),
    [
        ("mean_of_means", "llama", 2, None),
        ("unshifted_labels", "llama", 1, None),
        ("padded_row_in_the_loss", "llama", 1, None),
        ("no_shard_reduction", "llama", 2, None),
        ("no_replica_reduction", "llama", 4, 2),
        ("local_gradient_norm", "llama", 2, None),
        ("swapped_gate_and_up", "qwen3_moe", 2, None),
        ("expert_order", "qwen3_moe", 2, None),
        ("wrong_shard_offset", "llama", 2, None),
        ("norms_decay", "llama", 1, None),
    ],
)
def test_a_deliberate_fault_breaks_parity(
    rank_pool: RankPool, cases: Any, mutant: str, toy: str, ranks: int, fsdp_size: int | None
) -> None:
    case = cases(toy)
    sections = split(ranks, GLOBAL_BATCH // ranks, 1, fsdp_size=fsdp_size)
    sections["model"] = {"init_model_with_meta_device": True}
    rows = rank_pool.run(
        ROW, ranks=ranks, folder=case.folder, samples=case.samples, steps=STEPS, sections=sections, mutant=mutant
    )
    with pytest.raises(AssertionError, match=r"instead of|relative difference"):
        assert_parity(rows[0]["trace"], case.reference)
