"""The one place that builds models: `--spec`, and what a stage holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool, RowFailed
from tests.tasks.models.topologies import PP2, VPP

pytestmark = pytest.mark.distributed
ROW = "tests.tasks.models.rows:parameter_names"
HERE = "tests.tasks.models.specs"
Family = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "module"), [("qwen3", "qwen3_spec"), ("qwen3-moe", "qwen3_spec"), ("qwen2-moe", "qwen2_moe_spec")]
)
def test_the_specs_of_families_are_the_default(rank_pool: RankPool, family: Family, name: str, module: str) -> None:
    folder = str(family(name))
    [default] = rank_pool.run(ROW, ranks=1, folder=folder)
    [named] = rank_pool.run(
        ROW, ranks=1, folder=folder, spec=(f"mindspeed_llm.tasks.models.spec.{module}", "layer_spec")
    )
    assert named == default


def test_a_spec_of_the_users_is_used(rank_pool: RankPool, family: Family) -> None:
    folder = str(family("qwen3"))
    [by_function] = rank_pool.run(ROW, ranks=1, folder=folder, spec=(HERE, "without_norms"))
    [as_value] = rank_pool.run(ROW, ranks=1, folder=folder, spec=(HERE, "LAYER_WITHOUT_NORMS"))
    assert by_function == as_value
    assert [name for name in by_function[0] if "norm" in name] == ["decoder.final_layernorm.weight"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((HERE, "nothing"), r"--spec tests\.tasks\.models\.specs nothing: .*has no attribute 'nothing'"),
        (("no.such.module", "layer_spec"), r"--spec no\.such\.module layer_spec: No module named 'no'"),
    ],
)
def test_a_spec_that_is_none_is_refused(
    rank_pool: RankPool, family: Family, spec: tuple[str, str], message: str
) -> None:
    with pytest.raises(RowFailed, match=message) as caught:
        rank_pool.run(ROW, ranks=1, folder=str(family("qwen3")), spec=spec)
    assert caught.value.errors[0][1] == "UserError"


def test_stages_hold_their_layers_and_ends(rank_pool: RankPool, family: Family) -> None:
    folder = str(family("llama-tied"))
    first, second = rank_pool.run(ROW, ranks=2, folder=folder, **PP2, **VPP)

    def ends(chunks: list[list[str]]) -> list[set[str]]:
        return [{name for name in chunk if not name.startswith("decoder.layers.")} for chunk in chunks]

    assert ends(first) == [{"embedding.word_embeddings.weight"}, set()]
    # Of a tied model the last stage has a copy of the embedding.
    assert ends(second) == [set(), {"decoder.final_layernorm.weight", "output_layer.weight"}]
    layers = [{name.split(".")[2] for name in chunk if "layers" in name} for chunk in (*first, *second)]
    assert layers == [{"0"}] * 4


def test_the_values_of_a_list_must_fit_the_layers(rank_pool: RankPool, family: Family) -> None:
    values: dict[str, Any] = {"sliding_window": 8, "window_attn_skip_freq": (1, 0, 1)}
    with pytest.raises(
        RowFailed, match="--window-attn-skip-freq has 3 entries; expected one for each of --num-layers 4"
    ):
        rank_pool.run(ROW, ranks=1, folder=str(family("mistral")), unchecked=values)
