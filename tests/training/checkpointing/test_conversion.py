"""Files of training are converted to Hugging Face, and files of a conversion are trained from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_llm.tasks.checkpoint.convert import convert
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest
from tests.training.assembled import hub_weights
from tests.training.checkpointing.conftest import Workplace
from tests.training.checkpointing.test_resume import ALLTOALL, DISTRIBUTED, EP, PP, TP, VPP

pytestmark = pytest.mark.distributed
# (toy, ranks, flags, fields of the topology)
ROWS: dict[str, tuple[str, int, list[str], dict[str, Any]]] = {
    "TP2": ("llama", 2, [TP, "2"], {"tp": 2}),
    "PP2 tied": ("llama_tied", 2, [PP, "2"], {"pp": 2}),
    "PP2 VPP2": ("qwen3", 2, [PP, "2", VPP, "1"], {"pp": 2, "layers_per_virtual_stage": 1}),
    "distributed": ("qwen3", 2, [*DISTRIBUTED, "--overlap-param-gather"], {}),
    "EP2 grouped": ("mixtral", 2, [EP, "2", "--moe-grouped-gemm", *ALLTOALL], {"ep": 2, "moe_grouped_gemm": True}),
    "uneven": ("llama", 2, [PP, "2", "--num-layer-list", "3,1"], {"pp": 2, "num_layer_list": (3, 1)}),
    "TP2 bf16": ("llama", 2, [TP, "2", "--bf16"], {"tp": 2}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ROWS)
def test_training_to_hugging_face(place: Workplace, tmp_path: Path, name: str) -> None:
    toy, ranks, flags, _ = ROWS[name]
    # The learning rate of the first step is 0.
    saves = [(2, "torch", tmp_path / "run")]
    runs = place.train(toy, ranks, flags, steps=2, save=tmp_path, saves=saves, with_weights=True)
    convert(
        ConversionRequest(
            load_model_type="mg",
            save_model_type="hf",
            load_dir=tmp_path / "run",
            save_dir=tmp_path / "hf",
            hf_cfg_dir=place.toy(toy),
        )
    )
    found = {key: value for path in (tmp_path / "hf").glob("*.safetensors") for key, value in load_file(path).items()}
    expected = hub_weights(place.toy(toy), runs)
    assert found.keys() == expected.keys()
    before = load_file(place.toy(toy) / "model.safetensors")
    for key, values in expected.items():
        assert torch.equal(found[key].float(), values.float()), key
    assert any(not torch.equal(before[key], found[key].float()) for key in before.keys() & found.keys())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_hidden_layers"] == 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ROWS)
def test_a_conversion_to_training(place: Workplace, tmp_path: Path, name: str) -> None:
    toy, ranks, flags, topology = ROWS[name]
    (reference, *_) = runs = place.train(toy, ranks, flags, steps=0)
    convert(
        ConversionRequest(
            load_model_type="hf",
            save_model_type="mg",
            load_dir=place.toy(toy),
            save_dir=tmp_path,
            target={**topology, "padded_vocab_size": reference["args"].padded_vocab_size},
        )
    )
    (refused, *_) = place.train(toy, ranks, flags, steps=0, load=tmp_path)
    assert "give --no-load-optim and --no-load-rng to go without, as a conversion writes it" in refused["error"]
    for left_out in (["--no-load-optim", "--no-load-rng"], ["--finetune"]):
        loaded = place.train(toy, ranks, [*flags, *left_out], steps=0, load=tmp_path)
        assert [(run["error"], run["start"]) for run in loaded] == [(None, 0)] * ranks
        assert [run["weights"] for run in loaded] == [run["weights"] for run in runs]
        assert any("was written by another program" in line for line in loaded[0]["log"])
    first = place.train(toy, ranks, flags, steps=1)
    same = place.train(toy, ranks, [*flags, *left_out], steps=1, load=tmp_path)
    assert [run["steps"] for run in same] == [run["steps"] for run in first]
