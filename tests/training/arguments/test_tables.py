"""The user-visible surface is frozen: flags, values, defaults, and the tables of what does nothing, was renamed, or is
refused.

`surface.txt` is written anew by: python -m tests.training.arguments.test_tables
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.tasks.preprocess.tokenizers.base import TOKENIZER_KINDS
from mindspeed_llm.training.arguments.no_effect import IDLE, NO_EFFECT
from mindspeed_llm.training.arguments.not_yet import NOT_YET, NOT_YET_VALUES
from mindspeed_llm.training.arguments.parser import all_flags, make_parser
from mindspeed_llm.training.arguments.renamed import ALIASES, DEPRECATED, ELSEWHERE
from tests.training.arguments.lines import EXPERTS, arguments

SURFACE = Path(__file__).with_name("surface.txt")


def options() -> dict[str, argparse.Action]:
    """All flags that are read."""
    parser = make_parser(FEATURES, program="x")
    return {name: action for action in parser._actions for name in action.option_strings}


def surface() -> list[str]:
    """One line for each flag: its value, its name among the arguments, its default; then what is refused."""
    lines = []
    for name, action in options().items():
        shown = action.metavar if isinstance(action.metavar, str | None) else " ".join(action.metavar)
        kind = "no effect" if name in NO_EFFECT else f"{action.dest} = {action.default!r}"
        lines.append(f"{name} {shown or ''}".strip() + f" | {kind}")
    refused = [*NOT_YET, *(f"{name} {value}" for name, value in NOT_YET_VALUES)]
    return [*lines, *(f"{name} | refused" for name in sorted(refused))]


def test_flags_values_and_defaults_are_frozen() -> None:
    assert surface() == SURFACE.read_text(encoding="utf-8").splitlines()


def test_old_and_other_names_are_frozen() -> None:
    assert sorted(DEPRECATED) == [
        "--batch-size",
        "--cp-attention-mask-type",
        "--encoder-seq-length",
        "--model-parallel-size",
        "--moe-intermediate-size",
        "--multi-head-latent-attention",
        "--n-group",
        "--qk-nope-head-dim",
        "--qk-rope-head-dim",
        "--rope-scaling-beta-fast",
        "--rope-scaling-beta-slow",
        "--routed-scaling-factor",
        "--topk-group",
        "--use-deter-comp",
        "--use-mc2",
    ]
    assert sorted(ALIASES) == ["--moe-shared-expert-gate", "--npu-deterministic", "--partial-rotary-factor"]


# The 150 flags that the launch scripts of the mirrored interface use most.
USED_MOST = """
    adam-beta1 adam-beta2 add-qkv-bias attention-dropout attention-softmax-in-fp32 beta-fast beta-slow bf16
    ckpt-format clip-grad context-parallel-algo context-parallel-size data-path disable-bias-linear
    distributed-backend enable-hf2mg-convert eval-interval eval-iters exit-on-missing-checkpoint
    expert-model-parallel-size expert-tensor-parallel-size ffn-hidden-size finetune first-k-dense-replace
    gemm-gradient-accumulation-fusion global-batch-size group-query-attention handler-name hf-cfg-dir hidden-dropout
    hidden-size init-method-std initial-loss-scale input is-instruction-dataset kv-channels kv-lora-rank load
    load-dir load-model-type log-interval log-throughput lora-alpha lora-r lora-target-modules lr lr-decay-style
    lr-warmup-fraction lr-warmup-iters make-vocab-size-divisible-by manual-gc manual-gc-interval max-new-tokens
    max-position-embeddings micro-batch-size min-lr model-type-hf moe-alltoall-overlap-comm moe-aux-loss-coeff
    moe-ffn-hidden-size moe-grouped-gemm moe-layer-freq moe-permutation-async-comm moe-permute-fusion
    moe-router-dtype moe-router-enable-expert-bias moe-router-group-topk moe-router-load-balancing-type
    moe-router-num-groups moe-router-score-function moe-router-topk moe-router-topk-scaling-factor
    moe-token-dispatcher-type mtp-num-layers multi-latent-attention n-shared-experts no-gradient-accumulation-fusion
    no-load-optim no-load-rng no-masked-softmax-fusion no-pad-to-seq-lengths no-save-optim no-save-rng
    no-shared-storage noop-layers norm-epsilon norm-topk-prob normalization num-attention-heads num-experts
    num-layer-list num-layers num-layers-per-virtual-pipeline-stage num-query-groups output-prefix
    overlap-grad-reduce overlap-param-gather padded-vocab-size pipeline-model-parallel-size position-embedding-type
    prompt-type q-lora-rank qk-head-dim qk-layernorm qk-pos-emb-head-dim recompute-granularity recompute-method
    recompute-num-layers reset-attention-mask reuse-fp32-param rope-scaling-factor rope-scaling-mscale
    rope-scaling-mscale-all-dim rope-scaling-original-max-position-embeddings rope-scaling-type rotary-base save
    save-dir save-interval save-model-type seed seq-aux seq-length sequence-parallel spec split stage swap-optimizer
    swiglu target-pipeline-parallel-size target-tensor-parallel-size task tensor-model-parallel-size
    tokenizer-name-or-path tokenizer-not-use-fast tokenizer-type train-iters transformer-impl
    untie-embeddings-and-output-weights use-distributed-optimizer use-flash-attn use-fused-rmsnorm
    use-fused-rotary-pos-emb use-fused-swiglu use-mcore-models use-rotary-position-embeddings v-head-dim vocab-size
    weight-decay workers
"""
# Of these, flags of the converter.
OF_CONVERTER = {"load-dir", "save-dir", "load-model-type", "save-model-type"}
OF_CONVERTER |= {"target-tensor-parallel-size", "target-pipeline-parallel-size"}


def test_flags_that_scripts_use_are_known() -> None:
    names = USED_MOST.split()
    assert len(set(names)) == 150
    known = {*options(), *NOT_YET, *DEPRECATED, *ALIASES}
    assert {name for name in names if f"--{name}" not in known} == OF_CONVERTER
    # Most have an effect.
    assert sum(f"--{name}" in options() and f"--{name}" not in NO_EFFECT for name in names) >= 113


def test_every_flag_is_in_one_table() -> None:
    tables: dict[str, set[str]] = {
        "flags": {name for name in options() if name not in NO_EFFECT},
        "no effect": set(NO_EFFECT),
        "not yet": set(NOT_YET),
        "deprecated": set(DEPRECATED),
        "aliases": set(ALIASES),
        "elsewhere": set(ELSEWHERE),
    }
    names = list(tables)
    twice = [
        (first, second, tables[first] & tables[second])
        for i, first in enumerate(names)
        for second in names[i + 1 :]
        if tables[first] & tables[second]
    ]
    assert twice == []


def test_tables_name_flags_that_there_are() -> None:
    known = options()
    assert [name for name in IDLE if name not in known] == []
    assert [name for name in (*ALIASES.values(), *ELSEWHERE.values()) if name not in known] == []
    assert [name for name in DEPRECATED.values() if name not in known and name not in NOT_YET] == []
    assert [name for name, _ in NOT_YET_VALUES if name not in known] == []


def test_reasons_are_given() -> None:
    reasons = [*NOT_YET.values(), *NOT_YET_VALUES.values(), *(row.reason for row in NO_EFFECT.values())]
    reasons += [row.because for row in IDLE.values()]
    assert [reason for reason in reasons if len(reason) < 10 or reason.endswith(".")] == []


def test_refused_values_would_else_be_wrong_values() -> None:
    for name, value in NOT_YET_VALUES:
        convert = options()[name].type
        assert callable(convert)
        with pytest.raises(argparse.ArgumentTypeError):
            convert(value)


@pytest.mark.parametrize("name", all_flags())
def test_every_flag_is_documented(name: str) -> None:
    flag = all_flags()[name]
    assert len(flag.doc) > 5
    assert flag.doc.endswith(".")
    assert flag.used_by


def test_every_flag_has_a_name_of_its_own_among_the_arguments() -> None:
    dests = [action.dest for name, action in options().items() if name not in NO_EFFECT]
    assert len(set(dests)) == len(dests)


def test_idle_rows_ask_for_arguments_that_there_are() -> None:
    for base in ("", EXPERTS):
        args = arguments(base)
        assert [name for name, row in IDLE.items() if row.idle(args) not in (True, False)] == []


def test_kinds_of_tokenizers_are_those_of_the_preprocessing() -> None:
    assert options()["--tokenizer-type"].metavar == "|".join(TOKENIZER_KINDS)


# Field -> (default here, megatron-core's), where Megatron-LM's command line has another default than the class.
OTHER_DEFAULTS: dict[str, dict[str, tuple[Any, Any]]] = {
    "transformer": {"attention_softmax_in_fp32": (False, True), "overlap_p2p_comm": (True, False)},
    "optimizer": {},
    "ddp": {"align_param_gather": (True, False)},
}


@pytest.mark.parametrize("kind", ["transformer", "optimizer", "ddp"])
def test_defaults_are_megatrons(kind: str) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes: dict[str, Any] = {
        "transformer": TransformerConfig,
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
    }
    defaults = {field.name: field.default for field in dataclasses.fields(classes[kind])}
    # Sizes that Megatron-LM's command line leaves open, while the classes have a number.
    required = {"num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "lr", "min_lr"}
    found = {flag.dest: flag.default for flag in all_flags().values() if flag.dest in defaults}
    differing = {name: (found[name], defaults[name]) for name in found if found[name] != defaults[name]}
    assert {name: pair for name, pair in differing.items() if name not in required} == OTHER_DEFAULTS[kind]
    assert len(found) > {"transformer": 40, "optimizer": 15, "ddp": 2}[kind]


if __name__ == "__main__":
    SURFACE.write_text("\n".join(surface()) + "\n", encoding="utf-8")
