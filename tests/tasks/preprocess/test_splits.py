"""Split strings against megatron-core's split matrix."""

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import splits
from mindspeed_llm.tasks.preprocess.splits import parse_split, split_documents

SPLITS = ["98,1,1", "100,0,0", "969, 30, 1", "949,50,1", "1,1", "0.5,0.25,0.25", "99,1,0", "1,0,1", "0,1,0", "1,1,1"]
COUNTS = [0, 1, 2, 3, 5, 7, 10, 50, 99, 1000, 12345, 123457]


def _megatron(num_documents, split):
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
    edges = [None if part is None else [round(edge * float(num_documents)) for edge in part] for part in matrix]
    return [[] if part is None else list(range(*part)) for part in edges]


def _differences():
    return [
        (count, split)
        for split in SPLITS
        for count in COUNTS
        if [list(part) for part in split_documents(count, split)] != _megatron(count, split)
    ]


def test_equal_to_megatron_core():
    assert _differences() == []


def test_another_rounding_is_noticed(monkeypatch):
    monkeypatch.setattr(splits, "round", int, raising=False)
    assert _differences() != []


def test_by_hand():
    parts = split_documents(10, "80,10,10")
    assert [list(part) for part in parts] == [list(range(8)), [8], [9]]
    assert [len(part) for part in split_documents(7, "1,1")] == [4, 3, 0]
    assert parse_split("969, 30") == (969.0, 30.0, 0.0)
    assert sum(len(part) for part in split_documents(2**31 - 5, "98,1,1")) == 2**31 - 5


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "98,-1,3", "inf,1", "nan", "98/1/1", "1,,2"])
def test_mistakes(split):
    # megatron-core takes the numbers out of any text, so that 98/1/1 works, but also 1e-3 for 1 and 3.
    with pytest.raises(UserError, match="not a list of up to three numbers"):
        parse_split(split)


def test_nothing_at_all():
    with pytest.raises(UserError, match="gives every part 0"):
        split_documents(10, "0,0,0")
