"""Where layers stand, which files exist, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.layout import Rank, Topology, hf_layers, place, ranks, suggested_list
from mindspeed_llm.tasks.checkpoint.prepare import prepare
from tests.tasks.checkpoint import toys

PLACES = [
    # (topology, layers, for each stage and chunk the layers in their slots)
    ({"pp": 2}, 4, [["01"], ["23"]]),
    ({"pp": 3, "num_layer_list": (1, 3, 2)}, 6, [["0"], ["123"], ["45"]]),
    ({"pp": 2, "noop_layers": (0, 5)}, 4, [["-01"], ["23-"]]),
    ({"pp": 2, "layers_per_virtual_stage": 2}, 8, [["01", "45"], ["23", "67"]]),
    ({"pp": 2, "layers_per_virtual_stage": 1, "noop_layers": (0, 5)}, 4, [["-", "1", "3"], ["0", "2", "-"]]),
    ({"pp": 2, "schedules_method": "dualpipev"}, 8, [["01", "67"], ["23", "45"]]),
    ({"pp": 4, "schedules_method": "dualpipev"}, 8, [["0", "7"], ["1", "6"], ["2", "5"], ["3", "4"]]),
]


@pytest.mark.parametrize(("topology", "layers", "expected"), PLACES)
def test_places(topology: dict, layers: int, expected: list[list[str]]) -> None:
    chunks = place(Topology(**topology), range(layers))
    found: list[list[str]] = [[] for _ in expected]
    for chunk in chunks:
        slots = dict(chunk.layers)
        drawn = expected[chunk.stage][len(found[chunk.stage])]
        found[chunk.stage].append("".join(str(slots.get(local, "-")) for local in range(len(drawn))))
    assert found == expected
    assert sum(chunk.first for chunk in chunks) == sum(chunk.last for chunk in chunks) == 1


def test_whole_experts_need_fewer_files() -> None:
    def pairs(**sizes: int) -> list[tuple[int, int]]:
        return [(rank.tp, rank.ep) for rank in ranks(Topology(**sizes))]

    assert pairs(tp=2, ep=2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert pairs(tp=4, ep=2, etp=1) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert pairs(tp=2, ep=4, etp=1) == [(0, 0), (1, 1), (0, 2), (1, 3)]


def test_folder_names() -> None:
    assert Rank(1, 2, 3).folder(Topology(tp=2, pp=4, ep=8)) == "mp_rank_01_002_003"
    assert Rank(1, 0, 3).folder(Topology(tp=2, ep=8)) == "mp_rank_01_003"
    assert Rank(1, 2, 0).folder(Topology(tp=2, pp=4)) == "mp_rank_01_002"


def test_shorter_models() -> None:
    assert hf_layers(6, 3, num_layers=None, first_k_dense=None) == [0, 1, 2, 3, 4, 5]
    assert hf_layers(6, 3, num_layers=4, first_k_dense=1) == [0, 3, 4, 5]
    assert hf_layers(6, 3, num_layers=2, first_k_dense=None) == [0, 1]


def test_suggested_list() -> None:
    assert suggested_list(36, 8) == "5,5,5,5,4,4,4,4"


TP, PP, EP = "--target-tensor-parallel-size", "--target-pipeline-parallel-size", "--target-expert-parallel-size"
VPP, LIST, NOOP = "--num-layers-per-virtual-pipeline-stage", "--num-layer-list", "--noop-layers"
ETP = "--expert-tensor-parallel-size"
REFUSED = [
    ("qwen3", [PP, "3"], r"3 does not divide the 4 layers; use --num-layer-list 2,1,1"),
    ("qwen3", [PP, "8"], r"the model has only 4 layers"),
    ("qwen3", [PP, "2", LIST, "1,2"], r"sum is the number of layers, 4; for example 2,2"),
    ("qwen3", [PP, "2", LIST, "4"], r"has 1 numbers; expected one for each of the 2 stages"),
    ("qwen3", [PP, "2", LIST, "1,3", NOOP, "0"], r"goes without --noop-layers"),
    ("qwen3", [PP, "2", LIST, "1,3", VPP, "1"], r"goes without --num-layers-per-virtual"),
    ("qwen3", [PP, "2", VPP, "2"], r"each stage has 2 layers; expected a smaller number"),
    ("qwen3", [VPP, "2"], r"virtual stages need more than one pipeline stage"),
    ("qwen3", [NOOP, "0,7"], r"7 is no position of a pipeline of 6 layers"),
    ("qwen3", [PP, "2", NOOP, "0,1", "--schedules-method", "dualpipev"], r"6 layers .* do not divide into 2 x 2"),
    ("qwen3", [TP, "3"], r"2 KV groups do not divide over tensor parallel size 3"),
    ("qwen3", [TP, "4"], r"4 does not divide the 6 attention heads"),
    ("qwen3", [EP, "2"], r"the model has no experts"),
    ("qwen3", ["--mla-mm-split"], r"has no multi-head latent attention"),
    ("qwen3", ["--mtp-num-layers", "1"], r"the model has 0 MTP layers"),
    ("qwen3", ["--num-layers", "5"], r"expected 1 to 4"),
    ("qwen3", ["--first-k-dense-replace", "1"], r"all its layers are dense"),
    ("qwen3", ["--padded-vocab-size", "500"], r"at least 512, the vocabulary"),
    ("qwen3", ["--model-type-hf", "qwen3-moe"], r"qwen3-moe contradicts .*Qwen3ForCausalLM"),
    ("qwen3", ["--model-type-hf", "qwen9"], r"qwen9: expected one of llama2"),
    ("qwen3-moe", [EP, "3"], r"3 does not divide the 8 experts of a layer; expected one of \[1, 2, 4, 8\]"),
    ("qwen3-moe", [TP, "2", ETP, "4"], r"expected 1 .* or the value of --target-tensor-parallel-size, 2"),
    ("qwen3-moe", [TP, "2", EP, "2", ETP, "1", "--moe-tp-extend-ep"], r"two ways to keep experts whole"),
    ("qwen3-moe", [TP, "2", EP, "8", "--moe-tp-extend-ep"], r"8 x TP 2 .* does not divide the 8 experts"),
    ("deepseek3", ["--first-k-dense-replace", "2"], r"the source has 1 dense layers"),
    ("deepseek3", ["--mtp-num-layers", "2"], r"the model has 1 MTP layers; expected 0 to 1"),
    (
        "deepseek3",
        ["--mtp-num-layers", "1", "--transformer-impl", "transformer_engine"],
        r"goes without --mtp-num-layers",
    ),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {family: toys.toy(folder / family, family) for family in ("qwen3", "qwen3-moe", "deepseek3")}


@pytest.mark.parametrize(("family", "flags", "reason"), REFUSED)
def test_refused(family: str, flags: list[str], reason: str, sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        prepare(toys.request(sources[family], tmp_path / "out", *flags))
    assert not list(tmp_path.iterdir())


def test_odd_experts_are_refused(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3-moe", num_experts=5)
    with pytest.raises(UserError, match="does not divide the 5 experts"):
        prepare(toys.request(source, tmp_path / "out", EP, "2"))
