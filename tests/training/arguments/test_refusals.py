"""Combinations of flags that cannot be, each with the message that says why and what would do."""

from __future__ import annotations

import pytest

from mindspeed_llm.errors import UserError
from tests.training.arguments.lines import DENSE, EXPERTS, arguments

_NINE_HEADS = "--num-attention-heads 9 --num-query-groups 3"

# (flags on top of a line that is right, ranks, parts of the message)
REFUSED: list[tuple[str, int, tuple[str, ...]]] = [
    ("--save ''", 1, ("--save needs a value, found '' (an unset variable?)",)),
    ("--lr=", 1, ("--lr needs a value",)),
    # Ranks
    (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        6,
        (
            "the number of ranks is 6, no multiple of --tensor-model-parallel-size 2 x --pipeline-model-parallel-size "
            "2 = 4",
        ),
    ),
    ("--context-parallel-size 2", 2, ("--context-parallel-size 2: context parallelism is not available yet",)),
    (
        f"{EXPERTS} --expert-model-parallel-size 4",
        4,
        ("--expert-model-parallel-size 4 does not divide --num-experts 6; expected one of 1, 2, 3, 6",),
    ),
    (
        f"{EXPERTS} --expert-model-parallel-size 2 --pipeline-model-parallel-size 2",
        6,
        ("the number of ranks is 6, no multiple of --expert-model-parallel-size 2", "= 4"),
    ),
    (
        "--expert-model-parallel-size 2",
        2,
        ("--expert-model-parallel-size 2: the model has no experts to deal out; give --num-experts",),
    ),
    (
        f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 3",
        2,
        ("--expert-tensor-parallel-size 3: expected 1 (experts whole on each rank) or --tensor-model-parallel-size 2",),
    ),
    (
        f"{EXPERTS} --tensor-model-parallel-size 2",
        2,
        ("--num-experts 6 with --tensor-model-parallel-size 2 needs --sequence-parallel",),
    ),
    ("--sequence-parallel", 1, ("--sequence-parallel splits the sequence over", "which is 1; raise it or leave")),
    (
        "--sequence-parallel --tensor-model-parallel-size 2 --seq-length 33",
        2,
        ("--seq-length 33 does not divide over --tensor-model-parallel-size 2",),
    ),
    (
        f"{_NINE_HEADS} --tensor-model-parallel-size 2",
        2,
        (
            "--tensor-model-parallel-size 2 does not divide the 9 query heads and 3 key-value heads",
            "a rank would cut through a head; expected one of 1, 3",
        ),
    ),
    (
        "--num-attention-heads 8 --num-query-groups 2 --tensor-model-parallel-size 4",
        4,
        ("the 8 query heads and 2 key-value heads", "expected one of 1, 2"),
    ),
    (
        "--ffn-hidden-size 87 --tensor-model-parallel-size 2",
        2,
        ("--ffn-hidden-size 87 does not divide over --tensor-model-parallel-size 2",),
    ),
    # Stages
    (
        "--num-layers 36 --pipeline-model-parallel-size 8",
        8,
        ("--pipeline-model-parallel-size 8 does not divide --num-layers 36; use --num-layer-list 5,5,5,5,4,4,4,4",),
    ),
    (
        "--num-layers 5 --noop-layers 0,4 --pipeline-model-parallel-size 2",
        2,
        ("--num-layers 5 (2 noop layers included); use --num-layer-list 3,2",),
    ),
    ("--pipeline-model-parallel-size 8", 8, ("the model has only --num-layers 4; expected at most that many stages",)),
    (
        "--pipeline-model-parallel-size 2 --num-layer-list 2,1",
        2,
        ("--num-layer-list 2,1: expected numbers above 0 whose sum is --num-layers 4; for example 2,2",),
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layer-list 2,1,1",
        2,
        ("--num-layer-list 2,1,1 has 3 numbers; expected one for each stage of --pipeline-model-parallel-size 2",),
    ),
    (
        "--pipeline-model-parallel-size 2 --num-layer-list 3,1 --num-layers-per-virtual-pipeline-stage 1",
        2,
        ("--num-layer-list 3,1 goes without --num-layers-per-virtual-pipeline-stage",),
    ),
    ("--noop-layers 4", 1, ("--noop-layers 4: 4 is no position of --num-layers 4", "expected 0 to 3")),
    ("--noop-layers 1,1", 1, ("--noop-layers 1,1: a position occurs twice",)),
    (
        "--num-layers-per-virtual-pipeline-stage 2",
        1,
        ("virtual stages need more than one stage; raise --pipeline-model-parallel-size",),
    ),
    (
        "--num-layers 12 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
        2,
        ("--num-layers-per-virtual-pipeline-stage 4 does not divide the 6 layers of a stage", "one of 1, 2, 3, 6"),
    ),
    (
        "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--global-batch-size 3",
        2,
        ("a step has 3 micro batches", "change --global-batch-size to a multiple of 2"),
    ),
    (
        "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--global-batch-size 4 --microbatch-group-size-per-virtual-pipeline-stage 5",
        2,
        ("--microbatch-group-size-per-virtual-pipeline-stage 5: expected --pipeline-model-parallel-size 2 to 4",),
    ),
    # Batch and length
    (
        "--micro-batch-size 2 --global-batch-size 10",
        4,
        (
            "--global-batch-size 10 is no multiple of --micro-batch-size 2 x 4 data-parallel ranks = 8",
            "8 or 16 would do",
        ),
    ),
    (
        "--train-samples 100",
        1,
        ("--train-iters 10 and --train-samples 100 both say how long the run is; leave one of them out",),
    ),
    (
        "--lr-warmup-samples 10",
        1,
        ("--lr-warmup-samples goes with --train-samples, found --train-iters; use --lr-warmup-iters",),
    ),
    # Learning rate
    ("--min-lr 1e-2", 1, ("--min-lr 0.01 is more than --lr 0.001",)),
    ("--lr-warmup-iters 10", 1, ("--lr-warmup-iters 10: the learning rate would rise for 10 samples",)),
    (
        "--lr-warmup-iters 1 --lr-warmup-fraction 0.1",
        1,
        ("--lr-warmup-iters 1 and --lr-warmup-fraction 0.1 both say",),
    ),
    ("--lr-decay-style WSD", 1, ("--lr-decay-style WSD needs --lr-wsd-decay-iters",)),
    ("--weight-decay-incr-style linear", 1, ("--weight-decay-incr-style linear needs --start-weight-decay",)),
    # Structure
    (
        "--num-query-groups 4",
        1,
        ("--num-query-groups 4 does not divide --num-attention-heads 6; expected one of 1, 2, 3, 6",),
    ),
    ("--padded-vocab-size 500", 1, ("--padded-vocab-size 500", "at least 509, the vocabulary; 509 would do")),
    (
        "--padded-vocab-size 511 --tensor-model-parallel-size 2",
        2,
        ("--padded-vocab-size 511: expected a multiple of --tensor-model-parallel-size 2", "510 would do"),
    ),
    ("--seq-length 512", 1, ("--seq-length 512 is more than --max-position-embeddings 256",)),
    (
        "--position-embedding-type none --use-rotary-position-embeddings",
        1,
        ("--use-rotary-position-embeddings contradicts --position-embedding-type none",),
    ),
    (
        "--rope-scaling-type yarn",
        1,
        ("--rope-scaling-type yarn needs --rope-scaling-original-max-position-embeddings",),
    ),
    # Experts
    (f"{EXPERTS} --moe-router-topk 7", 1, ("--moe-router-topk 7: the layer has only --num-experts 6",)),
    (
        f"{EXPERTS} --moe-router-enable-expert-bias",
        1,
        ("--moe-router-enable-expert-bias goes with --moe-router-score-function sigmoid, found softmax",),
    ),
    (
        f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 2",
        1,
        ("--moe-router-num-groups 4 does not divide --num-experts 6",),
    ),
    (
        f"{EXPERTS} --moe-router-num-groups 6 --moe-router-group-topk 1",
        1,
        ("--moe-router-topk 2: --moe-router-group-topk 1 groups have only 1 experts",),
    ),
    (f"{EXPERTS} --moe-layer-freq [1,0,1]", 1, ("--moe-layer-freq has 3 elements", "--num-layers 4")),
    (f"{EXPERTS} --first-k-dense-replace 4", 1, ("leave no layer of 4 with experts",)),
    (
        f"{EXPERTS} --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type none",
        1,
        ("--moe-aux-loss-coeff 0.01: there is no such loss with --moe-router-load-balancing-type none",),
    ),
    (
        f"{EXPERTS} --n-shared-experts 2 --moe-shared-expert-intermediate-size 40",
        1,
        ("--n-shared-experts 2 x --moe-ffn-hidden-size 40 is 80", "is 40; leave one of them out"),
    ),
    (
        f"{EXPERTS} --moe-expert-capacity-factor 1.0 --moe-token-dispatcher-type allgather",
        1,
        ("--moe-expert-capacity-factor 1 goes with --moe-token-dispatcher-type alltoall, found allgather",),
    ),
    ("--moe-grouped-gemm", 1, ("--moe-grouped-gemm goes with --num-experts, which is missing",)),
    # Precision, optimizer, recomputation
    ("--bf16 --fp16", 1, ("--bf16 and --fp16 contradict each other; leave one of them out",)),
    (
        f"{EXPERTS} --fp16 --expert-model-parallel-size 2",
        2,
        ("--fp16 with --expert-model-parallel-size 2: parameters are in groups", "give a fixed --loss-scale, or"),
    ),
    (
        f"{EXPERTS} --fp16 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        2,
        ("--fp16 with --expert-tensor-parallel-size 1: parameters are in groups",),
    ),
    ("--overlap-param-gather", 1, ("--overlap-param-gather goes with --use-distributed-optimizer",)),
    (
        "--use-distributed-optimizer --overlap-param-gather",
        1,
        ("--overlap-param-gather goes with --overlap-grad-reduce",),
    ),
    ("--recompute-granularity full", 1, ("--recompute-granularity full needs --recompute-method uniform or block",)),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
        1,
        ("--recompute-num-layers 5: a stage has only 4 layers; expected 1 to 4",),
    ),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
        1,
        ("--recompute-num-layers 3 layers together, which do not divide the 4 of a stage; expected one of 1, 2, 4",),
    ),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 --num-layer-list 3,1 "
        "--pipeline-model-parallel-size 2",
        2,
        ("which do not divide the 3 of a stage; expected one of 1, 3",),
    ),
    ("--recompute-method block", 1, ("--recompute-method block goes with --recompute-granularity full, found None",)),
    (
        "--recompute-granularity selective --recompute-modules mlp atn",
        1,
        ("--recompute-modules atn: expected some of core_attn",),
    ),
    # Data and checkpoints
    ("--data-path a", 1, ("--data-path and --mock-data both say where samples come from",)),
    ("--split 98,1,1", 1, ("--split 98,1,1 divides --data-path, but --mock-data is given",)),
    ("--finetune", 1, ("--finetune goes with --load, which is missing",)),
    ("--tokenizer-type PretrainedFromHF", 1, ("--tokenizer-type PretrainedFromHF needs --tokenizer-name-or-path",)),
    ("--eod-mask-loss", 1, ("--eod-mask-loss looks for the token that ends a document", "--tokenizer-name-or-path")),
]


def test_the_line_that_they_stand_on_is_right() -> None:
    assert arguments().num_microbatches == 1
    assert arguments(EXPERTS).moe_layer_pattern == [1, 1, 1, 1]


@pytest.mark.parametrize(("flags", "ranks", "parts"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused(flags: str, ranks: int, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        arguments(flags, world_size=ranks)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize(
    "flag",
    [
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--max-position-embeddings",
        "--seq-length",
        "--micro-batch-size",
        "--train-iters",
        "--lr",
    ],
)
def test_what_is_needed_is_asked_for(flag: str) -> None:
    words = DENSE.split()
    place = words.index(flag)
    with pytest.raises(UserError, match=f"^{flag} is missing; expected "):
        arguments(base=" ".join(words[:place] + words[place + 2 :]))


def test_data_are_asked_for() -> None:
    with pytest.raises(UserError, match=r"^--data-path is missing; expected the prefix of a .bin/.idx pair"):
        arguments(base=DENSE.replace("--mock-data", ""))


def test_grouped_heads_need_their_flag() -> None:
    with pytest.raises(UserError, match=r"^--num-query-groups 2 goes with --group-query-attention"):
        arguments(base=DENSE.replace("--group-query-attention ", ""))


def test_experts_with_biases_are_refused() -> None:
    with pytest.raises(UserError, match=r"^--num-experts 6: experts have no biases here; add --disable-bias-linear"):
        arguments(EXPERTS, base=DENSE.replace("--disable-bias-linear ", ""))


def test_the_vocabulary_must_be_known() -> None:
    with pytest.raises(UserError, match=r"^the size of the vocabulary is not known; give --tokenizer-name-or-path"):
        arguments(base=DENSE.replace("--vocab-size 509 ", ""))


def test_part_data_need_data_for_training() -> None:
    with pytest.raises(UserError, match=r"^--valid-data-path is given, but --train-data-path is not"):
        arguments("--valid-data-path a", base=DENSE.replace("--mock-data", ""))
