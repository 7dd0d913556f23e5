"""Models of the Megatron backend answer as transformers does, however they are spread over ranks.

Logits: texts of different lengths in one batch, texts that go on behind a prefix, single tokens, moved slots. Answers:
greedy, texts of different lengths at once; and of a beam search.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.tasks.inference.adapters.megatron_ranks import connected
from tests.support.pool import RankPool
from tests.tasks.models import families

ROW = "tests.tasks.inference.megatron_rows:ask"
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP: dict[str, Any] = {"sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
VPP: dict[str, Any] = {"num_layers_per_virtual_pipeline_stage": 1}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
ETP1: dict[str, Any] = {"expert_tensor_parallel_size": 1}
ALLTOALL: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
# As training may have had it; generation must not drop tokens.
CAPACITY: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": 0.5}
RECOMPUTE: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
# Toy (qwen25-tied-windows: windows in the upper layers; mixtral: experts and windows), ranks, arguments, copies.
ROWS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "dense": ("llama2", 1, RECOMPUTE | {"hidden_dropout": 0.1, "attention_dropout": 0.1}, 1),
    "windows": ("qwen25-tied-windows", 1, {}, 1),
    "experts": ("mixtral", 1, CAPACITY, 1),
    "tp2": ("qwen25-tied-windows", 2, TP2 | SP, 1),
    "tp2 padding": ("llama2", 2, TP2 | {"padded_vocab_size": 1024}, 1),
    "tp2 experts": ("qwen2-moe", 2, TP2 | SP, 1),
    "pp2": ("qwen25-tied-windows", 2, PP2 | VPP, 1),
    "ep2": ("mixtral", 2, EP2 | ALLTOALL, 1),
    "tp2 pp2": ("llama-tied", 4, TP2 | PP2, 1),
    "ep2 tp2 of whole experts": ("qwen3-moe", 4, EP2 | TP2 | SP | ETP1 | ALLTOALL, 2),
    "two copies": ("mixtral", 4, EP2, 2),
}
EACH_RUN = ("dense", "experts", "tp2", "tp2 experts", "pp2", "ep2", "tp2 pp2", "two copies")
WITH_BEAMS = ("tp2", "pp2", "ep2")
PROMPTS = [[5, 17, 200], [301] * 20, [9, 8, 7, 6, 5, 4, 3], [44, 45], list(range(30, 62))]
NEW_TOKENS = 20
Family = Callable[[str], Path]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The directory of a toy with what transformers computes for its samples."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            model = families.build(name)
            made[name] = folder = tmp_path_factory.mktemp("toys") / name
            model.save_pretrained(folder)
            ids = families.token_ids()
            with torch.no_grad():
                torch.save({"ids": ids, "logits": model(ids).logits}, folder / "reference.pt")
        return made[name]

    return of


def answer_of(name: str, prompt: list[int], *, beams: int = 1) -> tuple[int, ...]:
    """transformers' answer to a prompt alone; without the token that ends it."""
    model = families.build(name)
    model.generation_config.pad_token_id = 0
    whole = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=beams,
        use_cache=True,
        eos_token_id=2,
    )
    answer = whole[0, len(prompt) :].tolist()
    return tuple(answer[: answer.index(2)] if 2 in answer else answer)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [name if name in EACH_RUN else pytest.param(name, marks=pytest.mark.long) for name in ROWS]
)
def test_logits_and_answers_equal_transformers(rank_pool: RankPool, family: Family, name: str) -> None:
    toy, ranks, values, copies = ROWS[name]
    beams = 3 if name in WITH_BEAMS else 0
    found = rank_pool.run(
        ROW, ranks=ranks, folder=str(family(toy)), prompts=PROMPTS, max_new_tokens=NEW_TOKENS, beams=beams, **values
    )
    for of_rank in found:
        assert max(of_rank["errors"].values()) < 1e-5, of_rank["errors"]
        assert len(of_rank["errors"]) == 8
    # All ranks of a copy have the same bits, and one of them speaks for it.
    by_copy = {number: [each for each in found if each["copy"][0] == number] for number in range(copies)}
    assert [each["copy"][1] for each in found] == [copies] * ranks
    for of_copy in by_copy.values():
        assert len(of_copy) == ranks // copies
        assert len({each["bits"] for each in of_copy}) == 1
        assert [each["copy"][2] for each in of_copy] == [True] + [False] * (len(of_copy) - 1)
    answers: dict[int, tuple[int, ...]] = {}
    for of_rank in found:
        for place, answer in of_rank["answers"].items():
            assert answers.setdefault(place, answer) == answer
    assert answers == {place: answer_of(toy, prompt) for place, prompt in enumerate(PROMPTS)}
    best = answer_of(toy, PROMPTS[-1], beams=beams) if beams else None
    assert [of_rank["best"] for of_rank in found] == [best] * ranks
    assert best != answers[len(PROMPTS) - 1]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mutant", "toy"),
    [("positions_of_columns", "llama2"), ("stale_places", "llama2"), ("one_more_seen", "qwen25-tied-windows")],
)
def test_faults_are_found(rank_pool: RankPool, family: Family, mutant: str, toy: str) -> None:
    (found,) = rank_pool.run(ROW, ranks=1, folder=str(family(toy)), mutant=mutant)
    assert max(found["errors"].values()) > 1e-2


def test_ranks_that_wait_for_one_another_share_a_copy() -> None:
    # TP 2, EP 2 with experts cut as the rest, on 8 ranks: groups of megatron-core's order tp-cp-ep-dp-pp.
    tensor = [(0, 1), (2, 3), (4, 5), (6, 7)]
    experts = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert connected([*tensor, *experts]) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert connected([*tensor, (0, 4), (1, 5), (2, 6), (3, 7)]) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert connected([(0,), (1,), (2,)]) == [(0,), (1,), (2,)]
    # A group that joins two that were apart.
    assert connected([(0, 1), (2, 3), (1, 2)]) == [(0, 1, 2, 3)]
