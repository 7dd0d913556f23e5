"""Where layers stand: the arithmetic by hand and against megatron-core's layout, and blocks built on two ranks."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest

from mindspeed_llm.core import layer_layout
from tests.support.pool import RankPool

ROWS = "tests.core.layer_rows"


def _args(**given: Any) -> Namespace:
    defaults: dict[str, Any] = {
        "num_layers": 4,
        "noop_layers": None,
        "num_layer_list": None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "moe_layer_freq": 1,
        "first_k_dense_replace": None,
        "init_method_std": 0.02,
    }
    return Namespace(**{**defaults, **given})


def test_layers_follow_each_other_around_noop_layers() -> None:
    args = _args(num_layers=6, noop_layers=(0, 4))
    assert layer_layout.layers_at(args) == [None, 0, 1, 2, None, 3]
    assert layer_layout.num_real_layers(args) == 4
    assert layer_layout.at_positions("abcd", args, noop="-") == ["-", "a", "b", "c", "-", "d"]
    assert layer_layout.layers_at(_args()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [[range(4)]]),
        ({"pipeline_model_parallel_size": 2}, [[range(2)], [range(2, 4)]]),
        ({"pipeline_model_parallel_size": 2, "num_layer_list": (3, 1)}, [[range(3)], [range(3, 4)]]),
        # As megatron-core's comment on interleaving has it: stage 0 [0, 1] [4, 5], stage 1 [2, 3] [6, 7].
        (
            {"num_layers": 8, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]],
        ),
    ],
)
def test_positions_of_stages(given: dict[str, Any], expected: list[list[range]]) -> None:
    assert layer_layout.layer_positions(_args(**given)) == expected


def test_local_indices_keep_the_gap_of_a_noop_layer() -> None:
    chunks = layer_layout.chunks(_args(num_layers=6, noop_layers=(0, 4), pipeline_model_parallel_size=2))
    assert [chunk.layers for chunk in chunks] == [[(1, 0), (2, 1)], [(0, 2), (2, 3)]]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"moe_layer_freq": -1, "first_k_dense_replace": -1}, [1, 1, 1, 1]),
        ({"first_k_dense_replace": 1}, [0, 1, 1, 1]),
        ({"moe_layer_freq": 2}, [1, 0, 1, 0]),
        ({"moe_layer_freq": (0, 1, 1, 0)}, [0, 1, 1, 0]),
        # The noop layer in front moves the dense layer to position 1, and has no experts itself.
        ({"num_layers": 6, "noop_layers": (0, 4), "first_k_dense_replace": 1}, [0, 0, 1, 1, 0, 1]),
        ({"num_layers": 6, "noop_layers": (0, 4), "moe_layer_freq": 2}, [0, 1, 0, 1, 0, 0]),
        ({"num_layers": 6, "noop_layers": (0, 4), "moe_layer_freq": (1, 1, 0, 1, 1, 1)}, [0, 1, 0, 1, 0, 1]),
    ],
)
def test_noop_layers_have_no_experts_and_shift_none(given: dict[str, Any], expected: list[int]) -> None:
    assert layer_layout.moe_pattern(_args(**given)) == expected


def test_uneven_stages_are_a_layout_of_megatron_core() -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    args = _args(num_layers=7, num_layer_list=(2, 1, 4), pipeline_model_parallel_size=3)
    text = layer_layout.pipeline_layout(args)
    assert text == "Ett|t|ttttL"
    layout = PipelineParallelLayerLayout(text, 3)
    layout.validate_layer_layout(num_layers=7, mtp_num_layers=0)
    assert [row[0].count(LayerType.decoder) for row in layout.layout] == [2, 1, 4]
    assert layer_layout.pipeline_layout(_args()) is None


def test_weights_of_a_model_with_noop_layers_start_as_large_as_without() -> None:
    import torch

    fields = layer_layout.config_fields(_args(num_layers=6, noop_layers=(0, 4)))
    assert fields["hetereogenous_dist_checkpoint"] is True
    torch.manual_seed(0)
    # megatron-core: the standard deviation of layers that write to the residual is std / sqrt(2 * layers).
    found = fields["output_layer_init_method"](torch.empty(1000, 100)).std().item()
    assert found == pytest.approx(0.02 / (2 * 4) ** 0.5, rel=0.02)
    assert layer_layout.config_fields(_args()) == {"pipeline_model_parallel_layout": None}


def test_the_layout_needs_no_torch() -> None:
    code = (
        "import sys\nfrom mindspeed_llm.core import layer_layout\n"
        "print([name for name in ('torch', 'megatron') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Twelve of each of the four layers, and the final norm's two.
_TENSORS = 4 * 12 + 2
_TOPOLOGIES: dict[str, dict[str, Any]] = {
    "pp2": {"num_layers": 4},
    "num_layer_list": {"num_layers": 4, "num_layer_list": (3, 1)},
    "noop_first": {"num_layers": 6, "noop_layers": (0, 4)},
    "noop_stage_ends": {"num_layers": 8, "noop_layers": (0, 3, 4, 7)},
    "noop_last_stage_only": {"num_layers": 8, "noop_layers": (4, 5, 6, 7)},
    "vpp2": {"num_layers": 4, "virtual_pipeline_model_parallel_size": 2},
    # Chunks of positions [0, 1][4, 5] and [2, 3][6, 7]: the first chunk of the second stage is empty.
    "vpp2_noop_chunk": {"num_layers": 8, "noop_layers": (2, 3, 4, 7), "virtual_pipeline_model_parallel_size": 2},
}


@pytest.fixture(scope="module")
def plain(rank_pool: RankPool) -> dict[str, Any]:
    """Output and gradients of the four layers on one rank, without any of this."""
    return rank_pool.run(f"{ROWS}:run_blocks", ranks=1, args=_args(), **_WITH)[0]


_WITH = {"recompute": None}


@pytest.mark.distributed
@pytest.mark.parametrize("name", _TOPOLOGIES)
def test_blocks_of_any_layout_compute_the_same(rank_pool: RankPool, plain: dict[str, Any], name: str) -> None:
    import torch

    args = _args(pipeline_model_parallel_size=2, **_TOPOLOGIES[name])
    found = rank_pool.run(f"{ROWS}:run_blocks", ranks=2, args=args, **_WITH)
    assert torch.equal(found[1]["output"], plain["output"]) and plain["output"].std() > 0
    gradients = found[0]["gradients"] | found[1]["gradients"]
    assert gradients.keys() == plain["gradients"].keys() and len(gradients) == _TENSORS
    assert not [key for key, value in plain["gradients"].items() if not torch.equal(value, gradients[key])]
    assert torch.equal(found[0]["input_gradient"], plain["input_gradient"])


@pytest.mark.distributed
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", _TOPOLOGIES)
def test_keys_of_blocks_are_the_ones_of_the_converter(rank_pool: RankPool, name: str) -> None:
    args = _args(pipeline_model_parallel_size=2, **_TOPOLOGIES[name])
    found = rank_pool.run(f"{ROWS}:keys", ranks=2, args=args)
    expected: list[list[list[int]]] = [[], []]
    for chunk in layer_layout.chunks(args):
        expected[chunk.stage].append([local for local, _ in chunk.layers])
    assert [[chunk["layers"] for chunk in rank] for rank in found] == expected


@pytest.mark.distributed
def test_a_noop_layer_has_nothing_and_returns_its_input(rank_pool: RankPool) -> None:
    args = _args(num_layers=6, noop_layers=(0, 4), pipeline_model_parallel_size=2)
    for rank, position in zip(rank_pool.run(f"{ROWS}:noop_facts", ranks=2, args=args), (0, 4), strict=True):
        assert rank == {"parameters": 0, "state": 0, "same_object": True, "layer_number": position + 1}


@pytest.mark.distributed
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", _TOPOLOGIES)
def test_distributed_checkpoints_name_layers_without_gaps(
    rank_pool: RankPool, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Saved by two stages with noop layers, read by megatron-core itself into one stage without any."""
    import torch

    folder = str(tmp_path_factory.mktemp(name))
    args = _args(pipeline_model_parallel_size=2, **_TOPOLOGIES[name])
    saved = rank_pool.run(f"{ROWS}:save", ranks=2, args=args, folder=folder)
    [loaded] = rank_pool.run(f"{ROWS}:load", ranks=1, args=_args(), folder=folder)
    expected = saved[0] | saved[1]
    assert loaded.keys() == expected.keys() and len(loaded) == _TENSORS
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())


@pytest.mark.distributed
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_recomputed_blocks_with_noop_layers_compute_the_same(
    rank_pool: RankPool, plain: dict[str, Any], method: str
) -> None:
    import torch

    args = _args(num_layers=6, noop_layers=(0, 4), pipeline_model_parallel_size=2)
    found = rank_pool.run(f"{ROWS}:run_blocks", ranks=2, args=args, recompute=(method, 1))
    assert torch.equal(found[1]["output"], plain["output"])
    gradients = found[0]["gradients"] | found[1]["gradients"]
    assert all(torch.equal(value, gradients[key]) for key, value in plain["gradients"].items())
