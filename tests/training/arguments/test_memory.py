"""Bytes of a rank, against the formulas of the paper and arithmetic by hand."""

from __future__ import annotations

import pytest

from mindspeed_llm.training.arguments.memory import (
    activations_of,
    bytes_per_parameter,
    expert_ranks,
    layer_bytes,
    memory_of,
    optimizer_bytes,
    passes_in_flight,
)
from mindspeed_llm.training.arguments.parameters import Count, Stage, adapters_of, model_of, stages_of, whole_model
from mindspeed_llm.training.arguments.plan import bubble_fraction
from tests.training.arguments.lines import DENSE, EXPERTS, arguments

# The paper's model: GELU, an MLP of 4h, as many key-value heads as query heads, dropout, 16 bits.
_S, _B, _H, _A = 64, 2, 96, 8
PAPER = (
    f"--num-layers 4 --hidden-size {_H} --num-attention-heads {_A} --vocab-size 512 --max-position-embeddings 64 "
    f"--make-vocab-size-divisible-by 1 --seq-length {_S} --micro-batch-size {_B} --train-iters 1 --lr 1e-3 --mock-data "
    "--bf16"
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("flags", ["", "--use-flash-attn", "--recompute-granularity selective"])
def test_a_layer_by_the_papers_formulas(tp: int, sequence_parallel: bool, flags: str) -> None:
    if sequence_parallel and tp == 1:
        return
    flags += f" --tensor-model-parallel-size {tp}" + (" --sequence-parallel" if sequence_parallel else "")
    args = arguments(flags, world_size=tp, base=PAPER)
    sbh, scores = _S * _B * _H, 5 * _A * _S * _S * _B
    if args.use_flash_attn or args.recompute_granularity:
        scores = 0
    expected = (34 * sbh + scores) / tp if sequence_parallel else sbh * (10 + 24 / tp) + scores / tp
    assert layer_bytes(args, moe=False) == expected


def test_all_layers_of_one_rank() -> None:
    """Equation 2 of the paper with the ends of the model: the dropout behind the embedding, the input of the final norm
    and of the output layer, and logits in fp32.
    """
    args = arguments(base=PAPER)
    [stage] = stages_of(model_of(args))
    sbh = _S * _B * _H
    layer = 34 * sbh + 5 * _A * _S * _S * _B
    assert activations_of(stage, args) == 4 * layer + sbh + 4 * sbh + 4 * _S * _B * 512


def test_the_first_stage_of_a_pipeline_holds_as_many_micro_batches_as_there_are_stages() -> None:
    args = arguments("--pipeline-model-parallel-size 4 --global-batch-size 16", world_size=4, base=PAPER)
    assert [passes_in_flight(stage, args) for stage in range(4)] == [4, 3, 2, 1]
    few = arguments("--pipeline-model-parallel-size 4 --global-batch-size 4", world_size=4, base=PAPER)
    assert [passes_in_flight(stage, few) for stage in range(4)] == [2, 2, 2, 1]


def test_virtual_stages_hold_more_by_the_papers_factor() -> None:
    # L (1 + (p - 1) / (p m)) layers on the first stage, with m parts of a stage.
    flags = "--num-layers 16 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
    args = arguments(f"{flags} --global-batch-size 16", world_size=4, base=PAPER)
    layers_in_flight = passes_in_flight(0, args) * 2
    assert layers_in_flight == 16 * (1 + 3 / (4 * 2))


@pytest.mark.parametrize(
    ("flags", "layers", "kept"),
    [
        # Inputs of all layers, and one layer at a time.
        ("--recompute-method uniform --recompute-num-layers 1", 1, 4),
        ("--recompute-method uniform --recompute-num-layers 2", 2, 2),
        # The other three layers are kept whole.
        ("--recompute-method block --recompute-num-layers 1", 4, 1),
    ],
)
def test_full_recomputation(flags: str, layers: int, kept: int) -> None:
    args = arguments(f"--recompute-granularity full {flags}", base=PAPER)
    [stage] = stages_of(model_of(args))
    sbh = _S * _B * _H
    layer = 34 * sbh + 5 * _A * _S * _S * _B
    ends = sbh + 4 * sbh + 4 * _S * _B * 512
    assert activations_of(stage, args) == layers * layer + kept * 2 * sbh + ends


def test_layers_with_local_updates_keep_nothing() -> None:
    flags = "--lora-target-modules linear_proj --lu-lora-final-layer-index 1"
    sbh = _S * _B * _H
    layer = 34 * sbh + 5 * _A * _S * _S * _B
    ends = sbh + 4 * sbh + 4 * _S * _B * 512
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    for more, expected in (("", 2 * layer + layer), (again, 2 * 2 * sbh + layer)):
        args = arguments(f"{flags} {more}", base=PAPER)
        [stage] = stages_of(model_of(args))
        assert activations_of(stage, args) == expected + ends


def test_a_gated_mlp_with_few_key_value_heads_and_no_dropout() -> None:
    args = arguments("--hidden-dropout 0 --attention-dropout 0 --use-flash-attn --bf16")
    tokens = 32
    # Inputs and outputs of two norms; query and output of 6 heads, key and value of 2; gate, up and their product.
    elements = 4 * 48 + (2 * 6 + 2 * 2) * 16 + 3 * 88
    assert layer_bytes(args, moe=False) == 2 * tokens * elements
    scores = 6 * 32 * 32
    with_scores = arguments("--hidden-dropout 0 --attention-dropout 0 --bf16")
    assert layer_bytes(with_scores, moe=False) == 2 * (tokens * elements + scores)
    fp32 = arguments("--hidden-dropout 0 --attention-dropout 0")
    assert layer_bytes(fp32, moe=False) == 4 * (tokens * elements + scores)


def test_recomputed_parts() -> None:
    base = f"{DENSE} --hidden-dropout 0 --attention-dropout 0 --use-flash-attn --bf16"
    whole = layer_bytes(arguments(base=base), moe=False)
    assert whole - layer_bytes(arguments("--recompute-norm", base=base), moe=False) == 2 * 32 * 2 * 48
    assert whole - layer_bytes(arguments("--recompute-activation-function", base=base), moe=False) == 2 * 32 * 88
    mlp = "--recompute-granularity selective --recompute-modules mlp"
    assert whole - layer_bytes(arguments(mlp, base=base), moe=False) == 2 * 32 * 3 * 88


def test_experts_hold_each_token_as_often_as_it_is_sent() -> None:
    base = f"{DENSE} --hidden-dropout 0 --attention-dropout 0 --use-flash-attn --bf16"
    args = arguments(EXPERTS, base=base)
    shared = 4 * 48 + (2 * 6 + 2 * 2) * 16
    assert layer_bytes(args, moe=True) == 2 * 32 * (shared + 2 * (48 + 3 * 40))
    more = arguments(f"{EXPERTS} --moe-shared-expert-intermediate-size 56", base=base)
    assert layer_bytes(more, moe=True) - layer_bytes(args, moe=True) == 2 * 32 * 3 * 56
    # Whole experts on two ranks that share the sequence: half of the tokens each.
    split = arguments(
        f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        world_size=2,
        base=base,
    )
    assert layer_bytes(split, moe=True) == layer_bytes(args, moe=True) // 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (4, 4, 8)),
        ("--bf16", (2, 4, 12)),
        ("--bf16 --grad-reduce-in-bf16", (2, 2, 12)),
        ("--bf16 --reuse-fp32-param", (2, 4, 10)),
        ("--fp16", (2, 2, 12)),
        ("--optimizer sgd", (4, 4, 4)),
    ],
)
def test_bytes_of_a_parameter(flags: str, expected: tuple[int, int, int]) -> None:
    assert bytes_per_parameter(arguments(flags)) == expected


def test_the_distributed_optimizer_spreads_its_state() -> None:
    args = arguments("--bf16 --use-distributed-optimizer", world_size=4)
    [stage] = stages_of(model_of(args))
    memory = memory_of(stage, args)
    count = stage.count.total
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * count, 4 * count, 12 * -(-count // 4))
    assert optimizer_bytes(stage.count, args, distributed=False) == 12 * count
    assert memory.total == memory.weights + memory.gradients + memory.optimizer + memory.activations


def test_state_of_experts_is_spread_over_the_ranks_that_have_them() -> None:
    args = arguments(f"{EXPERTS} --expert-model-parallel-size 3 --bf16 --use-distributed-optimizer", world_size=6)
    assert (args.data_parallel_size, expert_ranks(args)) == (6, 2)
    [chunk_stage] = stages_of(model_of(args))
    stage = Stage(
        index=0, chunks=chunk_stage.chunks, count=Count(shared=600, experts=100), trained=Count(shared=600, experts=100)
    )
    assert memory_of(stage, args).optimizer == 12 * (600 // 6 + 100 // 2)


@pytest.mark.parametrize(
    ("flags", "ranks", "expected"),
    [
        ("", 1, 0.0),
        ("--pipeline-model-parallel-size 4 --global-batch-size 16", 4, 3 / 8),
        (
            "--num-layers 16 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 "
            "--global-batch-size 16",
            4,
            3 / 16,
        ),
    ],
)
def test_bubble(flags: str, ranks: int, expected: float) -> None:
    assert bubble_fraction(arguments(flags, world_size=ranks, base=PAPER)) == expected


def test_adapters_alone_have_gradients_and_moments() -> None:
    """hidden 48, 6 heads and 2 key-value heads of 16, ffn 88, 4 layers; rank 4: A is [4, in], B is [out, 4]."""
    qkv, fc1, fc2 = 4 * (48 + 96 + 64), 4 * (48 + 176), 4 * (88 + 48)
    one = 4 * (qkv + fc1 + fc2)
    args = arguments("--lora-target-modules linear_qkv linear_fc1 linear_fc2 --lora-r 4")
    model = model_of(args)
    [stage] = stages_of(model, adapters_of(model, args))
    assert stage.trained.total == one
    assert stage.count.total == whole_model(model) + 2 * 3 * 48 + one  # 509 tokens are padded to 512
    memory = memory_of(stage, args)
    assert (memory.gradients, memory.optimizer) == (4 * one, 8 * one)
    # Parts with an A of their own.
    args = arguments("--lora-target-modules linear_q linear_v linear_fc1_up --lora-r 4")
    [stage] = stages_of(model, adapters_of(model, args))
    assert stage.trained.total == 4 * 4 * ((48 + 96) + (48 + 32) + (48 + 88))
    # Two ranks: B of the first layer and A of the second are cut; of experts each rank has half.
    args = arguments(
        "--lora-target-modules linear_fc1 linear_fc2 --lora-r 4 --tensor-model-parallel-size 2", world_size=2
    )
    model = model_of(args)
    [stage] = stages_of(model, adapters_of(model, args))
    assert stage.trained.total == 4 * 4 * (48 + 88 + 44 + 48)
    flags = f"{EXPERTS} --expert-model-parallel-size 2 --moe-grouped-gemm --lora-target-modules linear_fc2 --lora-r 4"
    args = arguments(flags, world_size=2)
    model = model_of(args)
    [stage] = stages_of(model, adapters_of(model, args))
    assert (stage.trained.shared, stage.trained.experts) == (0, 4 * 3 * 4 * (40 + 48))
