"""The whole way from the command line to files, for every benchmark, with models that need no weights."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.arguments import evaluation_arguments
from mindspeed_llm.tasks.evaluation.choosing import choose_all
from mindspeed_llm.tasks.evaluation.judge import BenchmarkResult
from mindspeed_llm.tasks.evaluation.main import load_tasks, main
from mindspeed_llm.tasks.evaluation.progress import Progress, progress_line
from mindspeed_llm.tasks.evaluation.registry import BENCHMARKS
from mindspeed_llm.tasks.evaluation.requests import Answer
from mindspeed_llm.tasks.evaluation.scores import score
from mindspeed_llm.tasks.evaluation.table import summary_line, table
from mindspeed_llm.tasks.evaluation.tasks import fitted
from tests.tasks.evaluation.data import write_all
from tests.tasks.evaluation.execution.test_sandbox import needs_sandbox
from tests.tasks.evaluation.models import Constant, Oracle, Toy

# Task -> what a model that says "A" or nothing everywhere gets right, of how many.
CHANCE = {
    "agieval": (2, 9),
    "bbh": (0, 6),
    "boolq": (4, 8),
    "ceval": (4, 16),
    "cmmlu": (4, 16),
    "gsm8k": (0, 8),
    "hellaswag": (2, 8),
    "human_eval": (0, 1),
    "mmlu": (4, 16),
    "mmlu_ppl": (4, 16),
    "needlebench": (0, 880),
}
FORMS = [
    *((name, ()) for name in CHANCE),
    ("agieval", ("--alternative-prompt",)),
    ("boolq", ("--alternative-prompt",)),
    ("cmmlu", ("--alternative-prompt",)),
    ("mmlu", ("--alternative-prompt", "--num-fewshot", "2", "--eval-language", "zh")),
    ("bbh", ("--chain-of-thought",)),
    ("gsm8k", ("--chain-of-thought",)),
]
RUNS_CODE = [pytest.param(*form, marks=needs_sandbox if form[0] == "human_eval" else ()) for form in FORMS]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("data"))


def oracle(args: Namespace) -> Toy:
    tasks = load_tasks(args, choose_all(args))
    return Oracle([fitted(task, Toy().encode, Toy.max_length) for task in tasks])


def run(folder: Path, paths: dict[str, Path], task: str, *flags: str, load: Callable) -> tuple[dict, list[dict]]:
    """The two files that an evaluation leaves."""
    where = ["--task", task, "--task-data-path", str(paths[task]), "--output-dir", str(folder)]
    assert main([*where, "--allow-code-execution", *flags], load) == 0
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return json.loads((folder / "results.json").read_text()), samples


def test_every_benchmark_has_a_row() -> None:
    assert set(CHANCE) == set(BENCHMARKS)


@pytest.mark.parametrize(("task", "flags"), RUNS_CODE)
def test_an_oracle_is_always_right(tmp_path: Path, paths: dict, task: str, flags: tuple[str, ...]) -> None:
    results, samples = run(tmp_path, paths, task, *flags, load=oracle)
    found = results["results"][task]
    assert (found["correct"], found["total"]) == (CHANCE[task][1], CHANCE[task][1])
    assert found["stderr"] in (0.0, None)
    assert found["warnings"] == []
    assert len(samples) == CHANCE[task][1]
    assert all(sample["correct"][found["metric"]] for sample in samples)
    assert [(sample["subject"], sample["index"]) for sample in samples] == sorted(
        (sample["subject"], sample["index"]) for sample in samples
    )
    assert "<html" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("task", [pytest.param(n, marks=needs_sandbox if n == "human_eval" else ()) for n in CHANCE])
def test_a_constant_model_has_its_chance(tmp_path: Path, paths: dict, task: str) -> None:
    results, samples = run(tmp_path, paths, task, load=lambda args: Constant(" A"))
    found = results["results"][task]
    assert (found["correct"], found["total"]) == CHANCE[task]
    ties = sum(sample.get("is_tie", False) for sample in samples)
    assert ties == sum(isinstance(sample["raw"], list) for sample in samples)
    assert [
        f"in {ties} of {CHANCE[task][1]} samples all choices were equally likely" in text for text in found["warnings"]
    ] == [True] * (ties > 0)


def test_several_tasks_and_what_is_printed(tmp_path: Path, paths: dict, capsys: pytest.CaptureFixture) -> None:
    argv = ["--task", "gsm8k", "mmlu", "--task-data-path", str(paths["gsm8k"]), str(paths["mmlu"]), "--output-dir"]
    flags = ["--max-eval-samples", "3", "--max-new-tokens", "1"]
    assert main([*argv, str(tmp_path), *flags], lambda args: Constant(" A")) == 0
    printed = capsys.readouterr().out
    assert "gsm8k acc = 0/3=0.0 (flexible-extract)\n" in printed
    assert "mmlu acc = 2/6=0.3333333333333333 (letter)\n" in printed
    lines = [line.split() for line in printed.splitlines()]
    assert ["subject", "question_n", "correct", "acc(letter)", "stderr", "get_response"] in lines
    assert ["anatomy", "3", "1", "0.3333", "0.3333", "0.3333"] in lines
    # Within each subject: sqrt(1/3 * 2/3 / 2) = 1/3; pooled over both: sqrt(2 * (1/9 * 2 * 3) / 4 / 6).
    assert ["total", "6", "2", "0.3333", "0.2357", "0.3333"] in lines
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["results"]) == ["gsm8k", "mmlu"]
    assert results["tasks"]["mmlu"]["max_new_tokens"] == 1
    assert results["flags"] == {
        "max_eval_samples": 3,
        "max_new_tokens": 1,
        "task": ["gsm8k", "mmlu"],
        "task_data_path": [str(paths["gsm8k"]), str(paths["mmlu"])],
    }
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize("original", [False, True])
def test_no_two_columns_have_one_name(original: bool) -> None:
    """Whatever the headline is: its accuracy stands in the same column, under its name."""
    for benchmark in BENCHMARKS.values():
        headline = benchmark.original_metric if original else benchmark.headline
        if headline is None:
            continue
        scores = {metric: score([metric == headline]) for metric in benchmark.answer.metrics}
        result = BenchmarkResult(
            name=benchmark.name, version="", headline=headline, subjects={}, total=scores, samples=(), warnings=()
        )
        _, names, total = (line.split() for line in table(result).splitlines())
        assert len({*names}) == len(names) == len(scores) + 4
        assert dict(zip(names, total, strict=True)) == {
            **{"subject": "total", "question_n": "1", "correct": "1", "stderr": "-"},
            **{metric: "0.0000" for metric in scores if metric != headline},
            names[3]: "1.0000",
        }
        assert names[3] == ("acc" if headline == "acc" else f"acc({headline})")
        line = summary_line(result)
        assert line.startswith(f"{benchmark.name} acc = 1/1=1.0") and line.endswith(f" ({headline})") == (
            headline != "acc"
        )


def test_a_conversation_does_not_go_on_with_a_text(paths: dict, tmp_path: Path) -> None:
    argv = ["--task", "human_eval", "--task-data-path", str(paths["human_eval"]), "--allow-code-execution"]
    for flags, variant in (
        (("--hf-chat-template",), "alternative-prompt"),
        (("--hf-chat-template", "--no-chat-template"), None),
        ((), None),
    ):
        (chosen,) = choose_all(evaluation_arguments([*argv, *flags]))
        assert chosen.variant == variant
        assert len(chosen.notices) == (variant is not None)


def test_thoughts_are_no_part_of_the_answer(paths: dict, tmp_path: Path) -> None:
    class Thinker(Toy):
        def answer(self, asked, on_answer) -> None:
            text = "<think>\nThe answer is C.\n</think>\n\nThe answer is A."
            for place in range(len(asked)):
                on_answer(place, Answer(raw=text, begins_at=text.index("The answer is A")))

    results, samples = run(tmp_path, paths, "mmlu", load=lambda args: Thinker())
    assert results["results"]["mmlu"]["correct"] == 4
    assert {sample["extracted"]["letter"] for sample in samples} == {"A"}
    assert {sample["extracted"]["get_response"] for sample in samples} == {"The answer is A."}
    assert samples[0]["raw"].startswith("<think>")


def test_what_a_killed_evaluation_has_left_half_is_removed(paths: dict, tmp_path: Path, monkeypatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a kill leaves no time for it
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, paths, "boolq", load=lambda args: Constant(" no"))
    assert list(tmp_path.glob(".samples.jsonl.*"))
    run(tmp_path, paths, "boolq", load=lambda args: Constant(" no"))
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == [
        "report.html",
        "results.json",
        "samples.jsonl",
    ]


def test_an_impossible_option_stays_within_json(paths: dict, tmp_path: Path) -> None:
    class Sure(Toy):
        def choose(self, question) -> tuple[float, ...]:
            return (0.0, *[float("-inf")] * (len(question.continuations) - 1))

    results, _ = run(tmp_path, paths, "boolq", load=lambda args: Sure())
    assert results["results"]["boolq"]["correct"] == 4
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert {tuple(row["raw"]) for row in rows} == {(0.0, -sys.float_info.max)}


def test_a_bar_on_a_terminal_and_lines_elsewhere(capsys: pytest.CaptureFixture) -> None:
    bar = Progress(enabled=True, show_bar=True)
    bar(1, 4)
    bar(4, 4)
    bar.close()
    shown = capsys.readouterr().err
    assert "4/4" in shown and "sample/s" in shown
    Progress(enabled=False, show_bar=True)(1, 4)
    assert capsys.readouterr().err == ""
    assert progress_line(20, 100, 10.0) == "answered 20 of 100 samples, 2.00 samples/s, 0:00:40 left"
    assert progress_line(1, 7201, 1.0) == "answered 1 of 7201 samples, 1.00 samples/s, 2:00:00 left"


def test_the_same_command_gives_the_same_bytes_and_another_is_refused(tmp_path: Path, paths: dict) -> None:
    run(tmp_path, paths, "mmlu", load=oracle)
    before = [(tmp_path / name).read_bytes() for name in ("results.json", "samples.jsonl")]
    run(tmp_path, paths, "mmlu", load=oracle)
    assert [(tmp_path / name).read_bytes() for name in ("results.json", "samples.jsonl")] == before
    with pytest.raises(UserError, match="holds the results of other questions; name another folder"):
        run(tmp_path, paths, "mmlu", "--num-fewshot", "2", load=_never)

    class Other(Constant):
        fingerprint = "another"

    with pytest.raises(UserError, match="holds the results of another model"):
        run(tmp_path, paths, "mmlu", load=lambda args: Other())
    assert [(tmp_path / name).read_bytes() for name in ("results.json", "samples.jsonl")] == before


def test_folders_without_a_name_differ(tmp_path: Path, paths: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for shots in ("1", "2", "1"):
        argv = ["--task", "mmlu", "--task-data-path", str(paths["mmlu"]), "--num-fewshot", shots]
        assert main(argv, lambda args: Constant(" A")) == 0
    assert len(list((tmp_path / "output" / "evaluation").glob("mmlu-*/results.json"))) == 2


def test_a_comparison_is_read_first(tmp_path: Path, paths: dict) -> None:
    run(tmp_path / "a", paths, "mmlu", load=lambda args: Constant(" A"))
    run(tmp_path / "b", paths, "mmlu", "--compare", str(tmp_path / "a" / "results.json"), load=oracle)
    for content, said in (
        ("{", "no JSON"),
        ("[]", "expected the results.json"),
        ('{"format": 1}', "expected the results"),
    ):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match=said):
            run(tmp_path / "c", paths, "mmlu", "--compare", str(tmp_path / "bad.json"), load=_never)


def _never(args: Namespace) -> Toy:
    raise AssertionError("no model may be loaded")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--task", "mmlu"), "--task names 1 benchmark .mmlu., --task-data-path 0 paths"),
        (("--task", "mmlu", "gsm8k", "--task-data-path", "a"), "give one path for each benchmark"),
        (("--task", "mmlu", "mmlu", "--task-data-path", "a", "b"), "names mmlu more than once"),
        ((), "--task is missing"),
        (("--task", "mmul", "--task-data-path", "a"), "Did you mean mmlu"),
        (("--task", "boolq", "--task-data-path", "a", "--num-fewshot", "3"), "bring no examples"),
        (("--task", "mmlu", "--task-data-path", "a", "--chain-of-thought"), "--chain-of-thought does not go with"),
        (("--task", "gsm8k", "--task-data-path", "a", "--alternative-prompt"), "--alternative-prompt does not go"),
        (
            ("--task", "mmlu", "--task-data-path", "a", "--alternative-prompt", "--chain-of-thought"),
            "two forms of a question",
        ),
        (("--task", "gsm8k", "--task-data-path", "a", "--eval-language", "zh"), "has no such prompts"),
        (("--task", "agieval", "--task-data-path", "a", "--eval-language", "zh"), "languages of their own"),
        (("--task", "boolq", "--task-data-path", "a", "--origin-postprocess"), "original scorer's already"),
        (("--task", "mmlu", "--task-data-path", "a", "--instruction-template", "{prompt}"), "no place for one"),
        (("--task", "human_eval", "--task-data-path", "a"), "add --allow-code-execution"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        main([*flags, "--output-dir", str(tmp_path)], _never)


def test_a_malformed_row_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    paths = write_all(tmp_path / "data")
    with (paths["mmlu"] / "virology_test.csv").open("a") as stream:
        stream.write("Q?,1,2,3,4,E\n")
    with pytest.raises(
        UserError, match=r"virology_test.csv, line 9: field 'answer' is 'E', expected one of the letters"
    ):
        run(tmp_path / "out", paths, "mmlu", load=_never)


@pytest.mark.parametrize(
    ("task", "metric", "original"),
    [("mmlu", "letter", "get_response"), ("gsm8k", "flexible-extract", "strict-match"), ("bbh", "first-line", "none")],
)
def test_the_headline_of_the_first_scorer(tmp_path: Path, paths: dict, task: str, metric: str, original: str) -> None:
    for name, flags in ((metric, ()), (original, ("--origin-postprocess",))):
        results, _ = run(tmp_path / name, paths, task, *flags, load=lambda args: Constant(" A. 3"))
        assert results["results"][task]["metric"] == name
        assert {metric, original} <= set(results["results"][task]["metrics"])
