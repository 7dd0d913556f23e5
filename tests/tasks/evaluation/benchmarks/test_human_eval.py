"""HumanEval in its original layout: our own problems, and the public ones where they are at hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Subject, request
from mindspeed_llm.tasks.evaluation.benchmarks.human_eval import BENCHMARK, block_of_code, instructed, load
from mindspeed_llm.tasks.evaluation.judge import BenchmarkResult
from mindspeed_llm.tasks.evaluation.requests import Generate
from tests.tasks.evaluation import lm_eval_files
from tests.tasks.evaluation.execution.test_sandbox import needs_sandbox
from tests.tasks.evaluation.models import Constant, Toy, evaluate

ROWS = [
    {
        "task_id": "Own/0",
        "prompt": 'import math\n\n\ndef double(x: float) -> float:\n    """Twice x, so that 2 gives 4."""\n',
        "entry_point": "double",
        "canonical_solution": "    return math.fsum([x, x])\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    },
    {
        "task_id": "Own/1",
        "prompt": 'def first(items: list):\n    """The first item, or None."""\n',
        "entry_point": "first",
        "canonical_solution": "    return items[0] if items else None\n",
        "test": "def check(candidate):\n    assert candidate([3, 4]) == 3\n    assert candidate([]) is None\n",
    },
]


def _write(folder: Path, rows: Sequence[dict], name: str = "HumanEval.jsonl") -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = folder / name
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return file


class Answers(Toy):
    """Writes given texts, one for each problem."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = iter(texts)

    def write(self, question: Generate) -> str:
        return next(self._texts)


def _result(benchmark: Benchmark, subjects: Sequence[Subject], texts: Sequence[str]) -> BenchmarkResult:
    return evaluate(benchmark, subjects, Answers(texts))


@needs_sandbox
@pytest.mark.parametrize("name", ["HumanEval.jsonl", "HumanEval.jsonl.gz"])
def test_an_oracle_is_right_and_a_constant_is_wrong(tmp_path: Path, name: str) -> None:
    _write(tmp_path, ROWS, name)
    subjects = load(tmp_path)
    right = [row["canonical_solution"] for row in ROWS]
    assert _result(BENCHMARK, subjects, right).total["pass@1"].accuracy == 1.0
    assert evaluate(BENCHMARK, subjects, Constant("    return 4")).total["pass@1"].accuracy == 0.0
    half = _result(BENCHMARK, subjects, ["    return x + x", "    return items[0]"])
    assert [sample.correct["pass@1"] for sample in half.samples] == [True, False]
    blocks = [f"Here it is:\n```python\n{row['prompt']}{row['canonical_solution']}```\nDone." for row in ROWS]
    assert _result(instructed(), subjects, blocks).total["pass@1"].accuracy == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("```python\ndef double(x):\n    return 2 * x\n```", True),
        # Without the import, which the prompt has.
        ("```\ndef double(x):\n    return math.fsum([x, x])\n```", True),
        # The first block only shows how it is called.
        ("Use it so:\n```\ndouble(2)\n```\n```py\ndef double(x):\n    return 2 * x\n```", True),
        ("    return 2 * x", True),
        ("```python\n    return 2 * x\n```", True),
        # Cut at the end of the room.
        ("```python\ndef double(x):\n    return 2 * x", True),
        ("```python\ndef double(x):\n    return x\n```", False),
        ("```python\ndef double(x):\n    return (2 * x\n```", False),
        ("I cannot.", False),
        ("", False),
    ],
)
def test_answers_to_instructions(tmp_path: Path, text: str, is_right: bool) -> None:
    _write(tmp_path, ROWS[:1])
    result = _result(instructed(), load(tmp_path), [text])
    assert result.samples[0].correct["pass@1"] is is_right


def test_the_code_of_an_answer() -> None:
    assert block_of_code("a\n```python\nx = 1\n```\nb") == "x = 1\n"
    assert block_of_code("no block") == "no block"


def test_requests_are_those_of_lm_eval(tmp_path: Path) -> None:
    task = lm_eval_files.task("humaneval/humaneval.yaml")
    _write(tmp_path, ROWS)
    (subject,) = load(tmp_path)
    for document in subject.documents:
        asked = request(BENCHMARK, subject, document)
        assert asked.prompt == lm_eval_files.render(task["doc_to_text"], dict(document.fields))
        assert list(asked.stop) == task["generation_kwargs"]["until"]
        assert asked.max_new_tokens == task["generation_kwargs"]["max_gen_toks"]


def test_a_text_of_the_users_own(tmp_path: Path) -> None:
    _write(tmp_path, ROWS[1:])
    benchmark = instructed("Write this:\n{prompt}")
    (subject,) = load(tmp_path)
    assert request(benchmark, subject, subject.documents[0]).prompt == "Write this:\n" + ROWS[1]["prompt"]
    with pytest.raises(UserError, match=r"--instruction-template 'Write it' has no \{prompt\}"):
        instructed("Write it")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"entry_point": "other"}, "line 2: field 'entry_point' is 'other', expected the name of a function"),
        ({"test": "assert True"}, "line 2: field 'test' is 'assert True', expected a program with a function check"),
        ({"prompt": None}, "line 2: field 'prompt' is None, expected a text"),
    ],
)
def test_a_malformed_row_names_file_and_line(tmp_path: Path, change: dict, said: str) -> None:
    file = _write(tmp_path, [ROWS[0], ROWS[1] | change])
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert f"{file}, {said}" in str(caught.value)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    file = _write(tmp_path, ROWS, "HumanEval.jsonl.gz")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match="cannot be unpacked"):
        load(tmp_path)


@needs_sandbox
@pytest.mark.real_data
def test_the_public_solutions_pass() -> None:
    folder = Path(__file__).parents[5] / "shared" / "data" / "eval" / "human_eval"
    if not folder.is_dir():
        pytest.skip("the public problems are not at hand")
    (subject,) = load(folder)
    part = Subject(name=subject.name, documents=subject.documents[::8])
    solutions = [BENCHMARK.target(document.fields) for document in part.documents]
    assert _result(BENCHMARK, [part], solutions).total["pass@1"].accuracy == 1.0
    assert _result(BENCHMARK, [part], ["    pass\n"] * len(solutions)).total["pass@1"].accuracy == 0.0
