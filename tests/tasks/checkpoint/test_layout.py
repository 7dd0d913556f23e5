"""Where layers stand, which files exist, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
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
TE, DUAL, GROUPED = "--transformer-impl transformer_engine", "--schedules-method dualpipev", "--moe-grouped-gemm"
REFUSED = [
    # (a small model of `toys` or `hf_toys`, flags, the reason)
    ("qwen3", [PP, "3"], r"3 does not divide the 4 layers; use --num-layer-list 2,1,1"),
    ("qwen3", [PP, "8"], r"the model has only 4 layers"),
    ("qwen3", [PP, "2", LIST, "1,2"], r"sum is the number of layers, 4; for example 2,2"),
    ("qwen3", [PP, "2", LIST, "4"], r"has 1 numbers; expected one for each of the 2 stages"),
    ("qwen3", [PP, "2", LIST, "1,3", NOOP, "0"], r"goes without --noop-layers"),
    ("qwen3", [PP, "2", LIST, "1,3", VPP, "1"], r"goes without --num-layers-per-virtual"),
    ("qwen3", [PP, "2", VPP, "2"], r"each stage has 2 layers; expected a smaller number"),
    ("qwen3", [VPP, "2"], r"virtual stages need more than one pipeline stage"),
    ("qwen3", [NOOP, "0,7"], r"7 is no position of a pipeline of 6 layers"),
    ("qwen3", [PP, "2", NOOP, "0,0"], r"--noop-layers 0,0: an index occurs twice"),
    ("qwen3", [PP, "2", LIST, "1,3", *DUAL.split()], r"goes without .* --schedules-method"),
    ("qwen3", [PP, "2", NOOP, "0,1", *DUAL.split()], r"6 layers .* do not divide into 2 x 2"),
    ("qwen3", [PP, "2", VPP, "1", *DUAL.split()], r"goes without --num-layers-per-virtual-pipeline-stage"),
    ("qwen3", DUAL.split(), r"--schedules-method dualpipev .* needs more than one pipeline stage"),
    ("qwen3", [TP, "3"], r"2 KV groups do not divide over tensor parallel size 3"),
    ("qwen3", [TP, "4"], r"4 does not divide the 6 attention heads"),
    ("qwen3", [EP, "2"], r"--target-expert-parallel-size 2: the model has no experts"),
    ("qwen3", [GROUPED], r"--moe-grouped-gemm: the model has no experts"),
    ("qwen3", ["--moe-tp-extend-ep"], r"--moe-tp-extend-ep: the model has no experts"),
    ("qwen3", [TP, "2", ETP, "4"], r"--expert-tensor-parallel-size 4: expected 1 .*, 2"),
    ("qwen3", ["--mla-mm-split"], r"has no multi-head latent attention"),
    ("qwen3", ["--mtp-num-layers", "1"], r"the model has 0 MTP layers"),
    ("qwen3", ["--num-layers", "5"], r"expected 1 to 4"),
    ("qwen3", ["--first-k-dense-replace", "1"], r"all its layers are dense"),
    ("qwen3", ["--padded-vocab-size", "500"], r"at least 512, the vocabulary"),
    ("qwen3", [TP, "2", "--padded-vocab-size", "513"], r"a multiple of tensor parallel size 2"),
    ("qwen3", ["--model-type-hf", "qwen3-moe"], r"qwen3-moe contradicts .*Qwen3ForCausalLM"),
    ("qwen3", ["--model-type-hf", "qwen9"], r"qwen9: expected one of llama2"),
    ("qwen3-moe", [EP, "3"], r"3 does not divide the 8 experts of a layer; expected one of \[1, 2, 4, 8\]"),
    ("qwen3-moe", [TP, "2", ETP, "4"], r"expected 1 .* or the value of --target-tensor-parallel-size, 2"),
    ("qwen3-moe", [TP, "2", EP, "2", ETP, "1", "--moe-tp-extend-ep"], r"two ways to keep experts whole"),
    ("qwen3-moe", [TP, "2", EP, "8", "--moe-tp-extend-ep"], r"8 x TP 2 .* does not divide the 8 experts"),
    ("deepseek3", ["--first-k-dense-replace", "2"], r"the source has 1 dense layers"),
    ("deepseek3", ["--mtp-num-layers", "2"], r"the model has 1 MTP layers; expected 0 to 1"),
    ("deepseek3", ["--mtp-num-layers", "1", *TE.split()], r"goes without --mtp-num-layers"),
    # Two ranks and three cannot be the same ones, and six experts divide by both.
    ("6 experts", [TP, "2", EP, "3", ETP, "1"], r"2 and --target-expert-parallel-size 3 must divide the other"),
    ("mamba2", [TP, "8"], r"8 does not divide the 4 groups of the state space"),
    ("mamba2", TE.split(), r"mamba2: --transformer-impl transformer_engine is not possible"),
    ("qwen3-next", [TP, "2"], r"--target-tensor-parallel-size 2 is not possible, at most 1: its attention layers"),
    ("qwen3-next", ["--mtp-num-layers", "2"], r"--mtp-num-layers 2 is not possible, at most 1"),
    ("minimax_m2", [TP, "2"], r"2 is not possible, at most 1: its query and key norms run over all heads"),
    ("longcat", TE.split(), r"longcat: --transformer-impl transformer_engine is not possible: its layers have two"),
    ("gpt-oss", [GROUPED], r"gpt-oss: --moe-grouped-gemm is not possible: its experts have biases"),
]


_CHANGED: dict[str, tuple[str, dict[str, int]]] = {
    "6 experts": ("qwen3-moe", {"num_experts": 6}),
    # 16 heads, so that it is not these which eight ranks cannot share.
    "mamba2": ("mamba2", {"hidden_size": 64}),
}


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory, hf_toy: Callable[[str], Path]) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("sources")

    def of(name: str) -> Path:
        family, changes = _CHANGED.get(name, (name, {}))
        if family not in toys.CONFIGS:
            return hf_toy(name)
        return folder / name if (folder / name).exists() else toys.toy(folder / name, family, **changes)

    return of


@pytest.mark.parametrize(("name", "flags", "reason"), REFUSED)
def test_refused(name: str, flags: list[str], reason: str, source_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Before anything is written, and the message names what the user may change."""
    with pytest.raises(UserError, match=reason) as error:
        prepare(toys.request(source_of(name), tmp_path / "out", *flags))
    words = [*(flag for flag in flags if flag.startswith("--")), "--num-layer-list", "tensor parallel size"]
    assert any(word in str(error.value) for word in words)
    assert not list(tmp_path.iterdir())


SIZES = [
    # (family, what config.json says, the reason)
    ("qwen3", {"num_key_value_heads": 4}, r"6 attention heads do not divide into 4 KV groups \(num_key_value_heads\)"),
    ("qwen3", {"num_key_value_heads": 0}, r"num_query_groups is 0, .*; expected a whole number above 0"),
    ("qwen3", {"hidden_size": 48.0}, r"hidden_size is 48\.0"),
    ("qwen3", {"num_hidden_layers": "4"}, r"num_hidden_layers is '4'"),
    ("qwen3", {"num_hidden_layers": -1}, r"num_hidden_layers is -1"),
    ("deepseek3", {"kv_lora_rank": True}, r"kv_lora_rank is True"),
    ("mamba2", {"n_groups": 0}, r"mamba_num_groups is 0"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), SIZES)
def test_sizes_that_are_none(
    name: str, changes: dict[str, object], reason: str, source_of: Callable[[str], Path], tmp_path: Path
) -> None:
    config = json.loads((source_of(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=reason):
        prepare(toys.request(source_of(name), tmp_path / "out", "--hf-cfg-dir", str(tmp_path)))


def test_odd_experts_are_refused(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3-moe", num_experts=5)
    with pytest.raises(UserError, match="does not divide the 5 experts"):
        prepare(toys.request(source, tmp_path / "out", EP, "2"))
