"""What follows from the flags, against arithmetic by hand."""

from __future__ import annotations

import shlex

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.training.arguments.checks.parallel import smallest_world_size
from mindspeed_llm.training.arguments.checks.structure import check_vocabulary
from mindspeed_llm.training.arguments.parser import parse
from mindspeed_llm.training.arguments.validate import world_size_of
from tests.training.arguments.lines import DENSE, EXPERTS, arguments

_NO_DATA = DENSE.replace("--mock-data", "")


def test_ranks_and_micro_batches() -> None:
    args = arguments(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 3 --global-batch-size 36",
        world_size=12,
    )
    assert (args.world_size, args.data_parallel_size, args.num_microbatches) == (12, 3, 4)


def test_the_global_batch_is_one_micro_batch_of_each_rank_by_default() -> None:
    args = arguments("--micro-batch-size 3", world_size=4)
    assert (args.global_batch_size, args.num_microbatches) == (12, 1)


@pytest.mark.parametrize(
    ("flags", "width"), [("--swiglu", 64), ("", 192), ("--swiglu --hidden-size 4096 --kv-channels 16", 10880)]
)
def test_width_of_the_mlp(flags: str, width: int) -> None:
    # 4 x 48 = 192; two thirds of it are 128 for a gated MLP, of 4 x 4096 they are 10922: multiples of 64.
    base = DENSE.replace("--swiglu ", "").replace("--ffn-hidden-size 88 ", "")
    assert arguments(flags, base=base).ffn_hidden_size == (128 if flags == "--swiglu" else width)


def test_heads() -> None:
    base = DENSE.replace("--kv-channels 16 ", "").replace("--group-query-attention --num-query-groups 2 ", "")
    args = arguments(base=base)
    assert (args.kv_channels, args.num_query_groups) == (8, 6)


@pytest.mark.parametrize(
    ("flags", "tp", "vocabulary"),
    [
        ("", 1, (509, 512)),
        ("--make-vocab-size-divisible-by 1", 2, (509, 510)),
        ("--make-vocab-size-divisible-by 100", 2, (509, 600)),
        ("--padded-vocab-size 700", 2, (509, 700)),
    ],
)
def test_vocabulary(flags: str, tp: int, vocabulary: tuple[int, int]) -> None:
    args = arguments(f"{flags} --tensor-model-parallel-size {tp}", world_size=tp)
    assert (args.vocab_size, args.padded_vocab_size) == vocabulary


def test_vocabulary_of_a_tokenizer() -> None:
    base = DENSE.replace("--vocab-size 509 ", "") + " --tokenizer-name-or-path x"
    args = arguments(base=base)
    assert (args.vocab_size, args.padded_vocab_size, args.tokenizer_type) == (None, None, "PretrainedFromHF")
    check_vocabulary(args, 300)
    assert (args.vocab_size, args.padded_vocab_size) == (300, 384)
    with pytest.raises(UserError, match="the tokenizer has 385 tokens, the model 384"):
        check_vocabulary(args, 385)


def test_virtual_stages() -> None:
    base = "--num-layers 12 --pipeline-model-parallel-size 2 --global-batch-size 4"
    by_layers = arguments(f"{base} --num-layers-per-virtual-pipeline-stage 2", world_size=2)
    by_parts = arguments(f"{base} --num-virtual-stages-per-pipeline-rank 3", world_size=2)
    for args in (by_layers, by_parts):
        assert args.virtual_pipeline_model_parallel_size == 3
        assert args.num_layers_per_virtual_pipeline_stage == 2
        assert args.microbatch_group_size_per_vp_stage == 2
        assert args.overlap_p2p_comm is True
    plain = arguments(base, world_size=2)
    assert (plain.virtual_pipeline_model_parallel_size, plain.overlap_p2p_comm) == (None, False)


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("", [1, 1, 1, 1]),
        ("--moe-layer-freq -1 --first-k-dense-replace -1", [1, 1, 1, 1]),
        ("--moe-layer-freq 2", [1, 0, 1, 0]),
        ("--first-k-dense-replace 1", [0, 1, 1, 1]),
        ("--first-k-dense-replace 1 --moe-layer-freq 2", [0, 0, 1, 0]),
        ("--moe-layer-freq [0,1]*2", [0, 1, 0, 1]),
        # Positions without effect have no experts, and do not shift which layers have.
        ("--num-layers 6 --noop-layers 0,5 --first-k-dense-replace 1", [0, 0, 1, 1, 1, 0]),
    ],
)
def test_layers_with_experts(flags: str, pattern: list[int]) -> None:
    assert arguments(f"{EXPERTS} {flags}").moe_layer_pattern == pattern


def test_experts() -> None:
    args = arguments(
        f"{EXPERTS} --n-shared-experts 3 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 3",
        world_size=6,
    )
    assert (args.moe_shared_expert_intermediate_size, args.expert_tensor_parallel_size) == (120, 2)
    assert args.data_parallel_size == 3


def test_schedule_in_steps() -> None:
    args = arguments("--global-batch-size 8 --train-iters 100 --lr-decay-iters 50 --lr-warmup-fraction 0.1")
    assert (args.lr_decay_steps, args.lr_warmup_steps, args.wd_incr_steps, args.wsd_decay_steps) == (400, 40, 800, None)


def test_schedule_in_samples() -> None:
    base = DENSE.replace("--train-iters 10 ", "")
    args = arguments(
        "--global-batch-size 8 --train-samples 100 --lr-warmup-samples 20 --lr-decay-style WSD "
        "--lr-wsd-decay-samples 30",
        base=base,
    )
    assert args.train_iters == 12
    assert (args.lr_decay_steps, args.lr_warmup_steps, args.wd_incr_steps, args.wsd_decay_steps) == (100, 20, 100, 30)


def test_weight_decay_is_constant_by_default() -> None:
    args = arguments("--weight-decay 0.3")
    assert (args.start_weight_decay, args.end_weight_decay) == (0.3, 0.3)


def test_gradients_of_bf16_are_added_up_in_fp32() -> None:
    assert arguments().accumulate_allreduce_grads_in_fp32 is False
    assert arguments("--bf16").accumulate_allreduce_grads_in_fp32 is True
    assert arguments("--bf16 --grad-reduce-in-bf16").accumulate_allreduce_grads_in_fp32 is False


def test_positions() -> None:
    base = DENSE.replace("--position-embedding-type rope ", "")
    assert arguments(base=base).position_embedding_type == "learned_absolute"
    assert arguments("--use-rotary-position-embeddings", base=base).position_embedding_type == "rope"
    args = arguments("--rope-scaling-type llama3")
    assert (args.rope_scaling_factor, args.low_freq_factor, args.high_freq_factor) == (8.0, 1.0, 4.0)
    assert args.original_max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("flags", "iterations", "notice"),
    [
        ("--data-path a", 100, None),
        ("--data-path a --split 100,0,0", 0, None),
        ("--data-path a --split 100,0,0 --eval-iters 5", 0, "--eval-iters 5 has no effect: --split 100,0,0 leaves no"),
        ("--data-path a --split 80,0,20 --eval-iters 5", 5, None),
        ("--train-data-path a --test-data-path c --eval-iters 5", 5, None),
        ("--train-data-path a --eval-iters 5", 0, "--eval-iters 5 has no effect: the lack of --valid-data-path and"),
        ("--train-data-path a --valid-data-path b --eval-iters 5", 5, None),
    ],
)
def test_evaluation_without_data(flags: str, iterations: int, notice: str | None) -> None:
    args = arguments(flags, base=_NO_DATA)
    assert args.eval_iters == iterations
    assert [line for line in args.notices if notice is None or line.startswith(notice)] == list(args.notices)
    assert len(args.notices) == (notice is not None)


@pytest.mark.parametrize(
    ("flags", "notices"),
    [
        ("--initial-loss-scale 4096 --bf16", ["--initial-loss-scale has no effect without --fp16"]),
        ("--initial-loss-scale 4096 --fp16", []),
        ("--moe-router-topk 2", ["--moe-router-topk has no effect without --num-experts"]),
        (f"{EXPERTS} --moe-router-topk 2", []),
        ("--min-lr 0 --lr-decay-style constant", ["--min-lr has no effect with --lr-decay-style constant"]),
        (
            "--reset-position-ids --position-embedding-type rope --tokenizer-name-or-path x",
            [
                "--reset-position-ids has no effect unless --position-embedding-type is learned_absolute (rotary "
                "positions say distances alone, and --reset-attention-mask keeps documents apart)"
            ],
        ),
        ("--no-save-optim", ["--no-save-optim has no effect without --save"]),
        ("--sgd-momentum 0.5", ["--sgd-momentum has no effect with --optimizer adam"]),
        ("--eval-interval 5 --eval-iters 0", ["--eval-interval has no effect with --eval-iters 0"]),
        (
            "--no-overlap-p2p-communication",
            ["--no-overlap-p2p-communication has no effect without --num-layers-per-virtual-pipeline-stage"],
        ),
    ],
)
def test_flags_that_hang_on_others(flags: str, notices: list[str]) -> None:
    assert list(arguments(flags).notices) == notices


@pytest.mark.parametrize(
    ("flags", "environment", "ranks"),
    [
        ("", {}, 1),
        ("", {"WORLD_SIZE": "4"}, 4),
        ("--check", {"WORLD_SIZE": "4"}, 4),
        ("--check 16", {"WORLD_SIZE": "4"}, 16),
        ("--check", {}, 4),
        ("--list-features", {}, 4),
    ],
)
def test_number_of_ranks(flags: str, environment: dict[str, str], ranks: int) -> None:
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    assert world_size_of(parse(shlex.split(f"{DENSE} {sizes} {flags}"), FEATURES), environment) == ranks


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3", 6),
        (f"{EXPERTS} --tensor-model-parallel-size 2 --expert-model-parallel-size 3", 6),
        (f"{EXPERTS} --tensor-model-parallel-size 2 --expert-model-parallel-size 3 --expert-tensor-parallel-size 1", 6),
        (f"{EXPERTS} --tensor-model-parallel-size 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 4),
    ],
)
def test_the_smallest_number_of_ranks(flags: str, ranks: int) -> None:
    assert smallest_world_size(parse(shlex.split(flags), FEATURES)) == ranks


def test_a_number_of_ranks_that_is_none() -> None:
    with pytest.raises(UserError, match="WORLD_SIZE 'x' in the environment"):
        world_size_of(parse([]), {"WORLD_SIZE": "x"})
