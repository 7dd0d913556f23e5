"""Several ranks share what one of them prepares."""

import pytest

from tests.fsdp2.data.helpers import write_jsonl

RUN = "tests.fsdp2.data.rows:build_and_read"


def _data(tmp_path, manager):
    if manager == "mg":
        file = write_jsonl(tmp_path / "t.jsonl", [{"text": f"text {i} " * 9} for i in range(9)])
        return {"dataset": {"file_name": file}, "data_manager_type": "mg", "cutoff_len": 16}, {"stage": "pt"}
    file = write_jsonl(tmp_path / "a.jsonl", [{"instruction": f"q{i}", "output": "a"} for i in range(9)])
    return {"dataset": {"file_name": file}, "template": "default"}, {}


@pytest.mark.parametrize("manager", ["lf", "mg"])
def test_one_rank_prepares_and_all_read(tmp_path, rank_pool, manager):
    data, training = _data(tmp_path, manager)
    results = rank_pool.run(RUN, ranks=2, folder=str(tmp_path), data=data, training=training)
    assert [result["tokenized"] for result in results] == [1, 0]
    assert [result["indexed"] for result in results] == [int(manager == "mg"), 0]
    assert results[0]["num_samples"] == results[1]["num_samples"]
    rows = [tuple(row) for result in results for row in result["rows"]]
    assert len(set(rows)) == len(rows) == 4


def test_the_failure_of_the_preparing_rank_reaches_all(tmp_path, rank_pool):
    data, training = _data(tmp_path, "lf")
    results = rank_pool.run(RUN, ranks=2, folder=str(tmp_path), data={**data, "cutoff_len": 4}, training=training)
    assert results[0] == results[1] and "prompt fills cutoff_len" in results[0]["error"]
    # The same ranks can go on.
    results = rank_pool.run(RUN, ranks=2, folder=str(tmp_path), data=data, training=training)
    assert "error" not in results[0]
