"""Inputs of pretraining: prefixes with and without weights, and names of other data."""

import re

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from mindspeed_llm.tasks.preprocess.pretrain_inputs import resolve_inputs


@pytest.fixture(autouse=True)
def files(tmp_path):
    for name in ("a_text_document", "b", "pairs_packed_chosen_input_ids_document", "alpaca_packed_input_ids_document"):
        with IndexedWriter(tmp_path / name) as writer:
            writer.add(np.arange(5))


def test_prefixes(tmp_path):
    inputs = resolve_inputs({"file_name": [0.3, "a_text_document", 0.7, "b.bin"]}, tmp_path)
    assert (inputs.prefixes, inputs.weights) == ([tmp_path / "a_text_document", tmp_path / "b"], [0.3, 0.7])
    inputs = resolve_inputs({"file_name": "b.idx"}, tmp_path)
    assert (inputs.prefixes, inputs.weights, inputs.texts) == ([tmp_path / "b"], None, [])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a", "x.file_name: {folder}/a is an output prefix; give the text below it, {folder}/a_text_document"),
        ("pairs", "x.file_name: {folder}/pairs is an output prefix; below it is pairwise data, not pretraining text"),
        ("alpaca", "below it is prompt data"),
        ("alpaca_packed_input_ids_document", "alpaca_packed_input_ids_document is one file of prompt data, not pre"),
        ([0.5, "c", 0.5, "b"], "'c' has a weight, but no c.bin and c.idx exist"),
        ([0.5, "b", "b"], "x.file_name: '0.5 b b' is neither names alone nor a weight before every name"),
    ],
)
def test_mistakes(tmp_path, name, message):
    with pytest.raises(UserError, match=re.escape(message.format(folder=tmp_path))):
        resolve_inputs({"file_name": name}, tmp_path, field="x")
