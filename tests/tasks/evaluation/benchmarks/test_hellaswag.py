"""HellaSwag in its original layout, against lm-eval's task file and its own cleaning of texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import request
from mindspeed_llm.tasks.evaluation.benchmarks.hellaswag import BENCHMARK, load
from tests.tasks.evaluation import lm_eval_files
from tests.tasks.evaluation.models import assert_oracle_is_right, constant_result, judged


def _item(number: int) -> dict:
    return {
        "ind": number,
        "activity_label": "Baking bread",
        "ctx_a": f"[header] How to bake {number} loaves [title] Take flour.",
        "ctx_b": "the baker" if number % 2 else "",
        "ctx": "both",
        "split": "val",
        "split_type": "indomain",
        "source_id": f"wikihow~{number}",
        "endings": ["eats [step] it.", "mixes  flour and water [substeps] slowly.", " sings.", "leaves the house."],
        "label": number % 4,
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "hellaswag_val.jsonl"
    file.write_text("".join(json.dumps(_item(number)) + "\n" for number in range(8)))
    return file


def test_a_whole_request(file: Path) -> None:
    (subject,) = load(file.parent)
    asked = [request(BENCHMARK, subject, document) for document in subject.documents[:2]]
    assert [one.context for one in asked] == [
        "Baking bread: How to bake 0 loaves. Take flour.",
        "Baking bread: How to bake 1 loaves. Take flour. The baker",
    ]
    assert asked[0].continuations == (" eats it.", " mixes flour and water slowly.", " sings.", " leaves the house.")


def test_texts_and_choices_are_those_of_lm_eval(file: Path) -> None:
    """lm-eval's functions for this task are run on the same rows."""
    task = lm_eval_files.task("hellaswag/hellaswag.yaml")
    theirs = lm_eval_files.function("hellaswag/utils.py", "preprocess")
    (subject,) = load(file)
    for document in subject.documents:
        item = _item(document.index)
        fields = {
            "query": theirs(item["activity_label"] + ": " + item["ctx_a"] + " " + item["ctx_b"].capitalize()),
            "label": item["label"],
        }
        assert BENCHMARK.prompt(document.fields) == lm_eval_files.render(task["doc_to_text"], fields)
        assert BENCHMARK.answer.choices(document.fields) == tuple(theirs(ending) for ending in item["endings"])
        assert str(BENCHMARK.answer.gold(document.fields)[0]) == lm_eval_files.render(task["doc_to_target"], fields)
    assert [metric["metric"] for metric in task["metric_list"]] == list(BENCHMARK.answer.metrics)


def test_the_length_of_an_ending_is_taken_out(file: Path) -> None:
    (subject,) = load(file)
    document = subject.documents[1]  # endings of 8, 29, 6 and 17 characters
    sample = judged(BENCHMARK, subject, document, [-16.0, -29.0, -15.0, -34.0])
    assert sample.extracted == {"acc": "sings.", "acc_norm": "mixes flour and water slowly."}
    assert sample.correct == {"acc": False, "acc_norm": True}


def test_an_oracle_is_right_and_a_constant_has_a_chance_of_one_in_four(file: Path) -> None:
    subjects = load(file)
    assert_oracle_is_right(BENCHMARK, subjects)
    assert constant_result(BENCHMARK, subjects).total["acc"].accuracy == 0.25


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": 4}, "field 'label' is 4, expected a number from 0 to 3"),
        ({"label": ""}, "field 'label' is '', expected a number"),
        ({"label": True}, "field 'label' is True, expected a number"),
        ({"endings": ["a", "b"]}, "field 'endings' is ['a', 'b'], expected a list of at least 4 texts"),
        ({"ctx_a": None}, "field 'ctx_a' is None, expected a text"),
    ],
)
def test_a_malformed_row_is_named(file: Path, change: dict, said: str) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps({**_item(9), **change}) + "\n")
    with pytest.raises(UserError) as caught:
        load(file)
    assert f"hellaswag_val.jsonl, line 9: {said}" in str(caught.value)


def test_a_number_as_text_is_a_number(file: Path) -> None:
    file.write_text(json.dumps({**_item(9), "label": "2"}))
    (subject,) = load(file)
    assert BENCHMARK.answer.gold(subject.documents[0].fields) == (2,)
