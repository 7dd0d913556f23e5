"""HF -> Megatron -> HF gives the source back bit for bit; the way between is every case of the reference files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.hf_reader import open_hf
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_reference import FAMILIES, pytestmark  # noqa: F401 (the mark of this module too)

LEFT_OUT = "left out"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", [*FAMILIES, "deepseek3.mtp2"])
def test_round_trip(family: str, tmp_path: Path) -> None:
    spec = toys.reference(family)
    source = toys.save_hf(tmp_path / "hf", spec["hf_config"], as_in_real_checkpoints(toys.weights(spec)))
    for number, case in enumerate(spec["cases"]):
        if "--num-layers" in case["flags"]:
            continue  # changes which layers there are
        between, back = tmp_path / f"mg{number}", tmp_path / f"hf{number}"
        try:
            dropped = toys.run(source, between, *case["flags"]).plan.dropped
        except UserError:
            # Upstream's output for it cannot be trained with.
            assert case["suspect"] and "refuse" in case["suspect"]
            continue
        # Half of the cases with the configuration at hand, half with what the checkpoint says about itself.
        config = ["--hf-cfg-dir", str(source)] if number % 2 else []
        toys.run(between, back, *config, of="mg", to="hf")
        expect_same(source, back, {name for name, reason in dropped.items() if LEFT_OUT in reason})
        if config:
            expected = dict(spec["hf_config"])
            if expected.get("num_nextn_predict_layers") and "--mtp-num-layers" not in case["flags"]:
                expected["num_nextn_predict_layers"] = 0
            assert json.loads((back / "config.json").read_text()) == expected


def as_in_real_checkpoints(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """MTP layers hold copies of both ends of the model; in the toy, each name has values of its own."""
    copies = {".embed_tokens.weight": "model.embed_tokens.weight", ".shared_head.head.weight": "lm_head.weight"}
    for name in weights:
        for end, of in copies.items():
            if name.startswith("model.layers.") and name.endswith(end):
                weights[name] = weights[of].clone()
    return weights


def expect_same(source: Path, back: Path, without: set[str]) -> None:
    """Same names, dtypes, shapes and bits."""
    before, after = open_hf(source), open_hf(back)
    assert sorted(set(before) - without) == sorted(after)
    for name, stored in after.items():
        assert stored.dtype == before[name].dtype and torch.equal(stored.view(), before[name].view()), name
