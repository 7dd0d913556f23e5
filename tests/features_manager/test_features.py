"""The features as they are shipped: what each declares, what it registers, and what it refuses."""

from __future__ import annotations

import io
from typing import Any

# Pictures compare modules that are loaded: these load all that the features patch.
import megatron.core.models.gpt.gpt_model
import megatron.core.transformer.moe.moe_layer  # noqa: F401
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.listing import print_features
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.features_manager.patches import Patches
from tests.features_manager.command import arguments
from tests.features_manager.toy_features import differences, picture

_PARTS = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
_TP2 = "--tensor-model-parallel-size 2 --num-attention-heads 4"
_EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 16 --disable-bias-linear --swiglu"

# Feature -> (flags that turn it on, ranks). Without flags: it is always on.
_ON: dict[str, tuple[str, int]] = {
    "any_device": ("", 1),
    "flash_attention": ("--use-flash-attn", 1),
    "fused_rmsnorm": ("--use-fused-rmsnorm --normalization RMSNorm", 1),
    "fused_swiglu": ("--use-fused-swiglu --swiglu", 1),
    "fused_rotary": ("--use-fused-rotary-pos-emb --position-embedding-type rope", 1),
    "overlapped_linears": (f"--use-ascend-coc --coc-parallel-num 2 {_TP2}", 2),
    "num_layer_list": ("--pipeline-model-parallel-size 2 --num-layer-list 3,1", 2),
    "noop_layers": ("--noop-layers 0", 1),
    "selective_recompute": ("--recompute-granularity selective", 1),
    "recompute_norm": ("--recompute-norm", 1),
    "recompute_activation_function": ("--recompute-activation-function", 1),
    "recompute_layers_per_stage": (f"--enable-recompute-layers-per-pp-rank {_PARTS}", 1),
    "reuse_fp32_param": ("--reuse-fp32-param --bf16", 1),
    "lora": ("--lora-target-modules linear_qkv linear_proj", 1),
    "lu_lora": ("--lora-target-modules linear_qkv linear_proj --lu-lora-final-layer-index 0", 1),
    "deterministic_mode": ("--deterministic-mode", 1),
    "profiling": ("--profile", 1),
}


_ALWAYS_ON = {name for name, (flags, _) in _ON.items() if not flags}


def test_each_feature_has_a_row() -> None:
    assert set(_ON) == {feature.name for feature in FEATURES}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_patches_what_it_declares_and_nothing_when_off(feature: Any) -> None:
    flags, ranks = _ON[feature.name]
    on, off = arguments(flags, world_size=ranks), arguments()
    assert feature.is_on(on) and feature.is_on(off) == (feature.name in _ALWAYS_ON)
    patches = Patches()
    feature.register_patches(patches, on)
    assert set(patches.targets(feature.name)) == set(feature.targets)
    for args in (on, off):
        manager, before = FeaturesManager(FEATURES), picture()
        manager.apply(args)
        of_feature = {patch.target for patch in manager.applied() if patch.feature == feature.name}
        is_changed = bool(differences(before, picture()))
        is_listed = bool(manager.applied())
        manager.undo()
        assert of_feature == (set(feature.targets) if feature.is_on(args) else set())
        assert is_changed == is_listed
        assert not differences(before, picture())


def test_all_features_go_together() -> None:
    """Those that do not exclude each other: all patch what they declare, and undo leaves nothing."""
    excluded = {"num_layer_list", "recompute_layers_per_stage"}
    flags = " ".join(flags for name, (flags, _) in _ON.items() if name not in excluded)
    manager, before = FeaturesManager(FEATURES), picture()
    args = arguments(flags, world_size=2, manager=manager)
    manager.apply(args)
    found = {patch.feature for patch in manager.applied()}
    manager.undo()
    assert found == {feature.name for feature in FEATURES if feature.targets} - excluded
    assert not differences(before, picture())


def test_settings_of_recomputation() -> None:
    from mindspeed_llm.tasks.models.config import transformer_config

    def config(flags: str) -> Any:
        found = transformer_config(arguments(flags))
        return found.recompute_granularity, found.recompute_modules

    assert config("--recompute-norm") == ("selective", ["layernorm"])
    assert config("--recompute-granularity selective --recompute-norm") == ("selective", ["core_attn", "layernorm"])
    assert config("--recompute-granularity selective --recompute-modules layernorm --recompute-norm") == (
        "selective",
        ["layernorm"],
    )
    # An MLP that is not of experts: megatron-core has no name for its activation, the patch does it.
    assert config("--recompute-activation-function")[0] is None
    assert config(f"--recompute-activation-function {_EXPERTS} --moe-grouped-gemm") == ("selective", ["moe_act"])
    assert config(f"--recompute-norm --recompute-activation-function {_EXPERTS} --moe-grouped-gemm") == (
        "selective",
        ["layernorm", "moe_act"],
    )


def test_linear_layers_are_in_chunks_where_there_is_something_to_overlap() -> None:
    from mindspeed_llm.core import overlapped_linears
    from mindspeed_llm.tasks.models.config import transformer_config
    from mindspeed_llm.tasks.models.layer_specs import linears_of

    def layers(flags: str) -> tuple[tuple[type, type], list[str]]:
        args = arguments(flags, world_size=2)
        idle = [notice for notice in args.notices if notice.startswith("--use-ascend-coc has no effect")]
        return linears_of(transformer_config(args)), idle

    chunks = (overlapped_linears.OverlappedColumnLinear, overlapped_linears.OverlappedRowLinear)
    assert layers(f"--use-ascend-coc --coc-parallel-num 4 {_TP2}") == (chunks, [])
    assert layers(f"--use-ascend-coc --coc-parallel-num 4 --coc-mode 2 {_TP2}") == (chunks, [])
    for flags in ("", "--use-ascend-coc", *(f"--use-ascend-coc --coc-parallel-num 4 --coc-mode {m}" for m in (0, 1))):
        found, idle = layers(f"{flags} {_TP2}")
        assert set(found).isdisjoint(chunks) and bool(idle) == bool(flags)
    # Nothing is sent: the layers pass their work on to megatron-core's.
    assert layers("--use-ascend-coc --coc-parallel-num 4")[1]


def test_the_fused_kernel_of_chunks_is_named_as_without_effect() -> None:
    notices = arguments(f"--use-ascend-coc --coc-parallel-num 2 --coc-fused-kernel {_TP2}", world_size=2).notices
    assert any(notice.startswith("--coc-fused-kernel has no effect") for notice in notices)


def test_experts_are_counted_without_noop_layers() -> None:
    args = arguments(f"{_EXPERTS} --noop-layers 0,2 --num-layers 6 --first-k-dense-replace 1")
    assert args.moe_layer_pattern == [0, 0, 0, 1, 1, 1]
    assert arguments(f"{_EXPERTS} --first-k-dense-replace 1").moe_layer_pattern == [0, 1, 1, 1]


@pytest.mark.parametrize("flag", ["--npu-deterministic", "--use-deter-comp"])
def test_other_names_of_deterministic_mode(flag: str) -> None:
    args = arguments(flag)
    assert args.deterministic_mode
    renamed = [notice for notice in args.notices if "--deterministic-mode" in notice]
    assert bool(renamed) == (flag == "--use-deter-comp")


@pytest.mark.parametrize(
    ("flags", "ranks", "words"),
    [
        ("--recompute-norm " + _PARTS, 1, ("--recompute-norm", "--recompute-granularity full")),
        (
            "--recompute-activation-function " + _PARTS,
            1,
            ("--recompute-activation-function", "--recompute-granularity full"),
        ),
        (
            "--recompute-activation-function --recompute-granularity selective --recompute-modules mlp",
            1,
            ("--recompute-activation-function", "--recompute-modules mlp"),
        ),
        ("--reuse-fp32-param", 1, ("--reuse-fp32-param", "--bf16", "have no master")),
        ("--reuse-fp32-param --fp16", 1, ("--reuse-fp32-param", "--bf16", "--fp16")),
        ("--enable-recompute-layers-per-pp-rank", 1, ("--enable-recompute-layers-per-pp-rank", "block", "None")),
        (
            "--enable-recompute-layers-per-pp-rank --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
            1,
            ("--enable-recompute-layers-per-pp-rank", "uniform"),
        ),
        (
            "--num-layers 8 --pipeline-model-parallel-size 4 --noop-layers 2,3",
            4,
            ("--noop-layers 2,3", "stage 1", "--pipeline-model-parallel-size 4"),
        ),
        (
            "--profile --profile-step-start 5 --profile-step-end 5",
            1,
            ("--profile-step-end 5", "--profile-step-start 5"),
        ),
        ("--profile --profile-step-start 20 --profile-step-end -1", 1, ("--profile-step-start 20", "--train-iters 20")),
        ("--profile --profile-ranks 0 2", 2, ("--profile-ranks 0 2", "rank 2", "0 to 1")),
    ],
)
def test_wrong_flags_are_refused_with_names_and_numbers(flags: str, ranks: int, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        arguments(flags, world_size=ranks)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_noop_layers_may_fill_the_first_and_the_last_stage() -> None:
    """Those have the embedding and the output layer to train."""
    arguments("--num-layers 8 --pipeline-model-parallel-size 2 --noop-layers 0,1,2,3", world_size=2)
    arguments("--num-layers 8 --pipeline-model-parallel-size 4 --noop-layers 0,1,2,6,7", world_size=4)


def _table(flags: str, ranks: int = 1) -> dict[str, list[str]]:
    out = io.StringIO()
    print_features(FeaturesManager(FEATURES).listing(arguments(flags, world_size=ranks)), out)
    return {cells[0]: cells[1:] for cells in (line.split("\t") for line in out.getvalue().splitlines())}


def test_listing_of_two_configurations() -> None:
    off, on = _table(""), _table("--noop-layers 0 --recompute-norm --recompute-activation-function --profile")
    assert set(off) - {"feature"} == {feature.name for feature in FEATURES} == set(on) - {"feature"}
    assert {name for name, cells in off.items() if cells[1] == "on"} == _ALWAYS_ON
    assert {name for name, cells in on.items() if cells[1] == "on"} - _ALWAYS_ON == {
        "noop_layers",
        "selective_recompute",
        "recompute_norm",
        "recompute_activation_function",
        "profiling",
    }
    # A feature that is off shows what it would patch.
    assert off["recompute_activation_function"][3] == "megatron.core.transformer.mlp.MLP.forward"
    assert off["recompute_activation_function"][3] == on["recompute_activation_function"][3]
    assert on["recompute_norm"][2] == "recompute_granularity=selective recompute_modules=('layernorm',)"
    assert off["recompute_norm"][2] == "-"
    assert "--profile-save-path" in on["profiling"][0].split()
