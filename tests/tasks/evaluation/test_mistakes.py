"""Mistakes that are met before a model is loaded, and how an evaluation that cannot go on says so."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.arguments import evaluation_arguments
from mindspeed_llm.tasks.evaluation.benchmarks import bbh
from mindspeed_llm.tasks.evaluation.files import files_by_subject, one_file
from mindspeed_llm.tasks.evaluation.interruption import how_far
from mindspeed_llm.tasks.evaluation.main import main
from mindspeed_llm.tasks.evaluation.progress import progress_line
from mindspeed_llm.tasks.evaluation.registry import find
from mindspeed_llm.tasks.evaluation.results import writing
from mindspeed_llm.tasks.inference.likelihood import _Sums
from mindspeed_llm.tasks.inference.pairs import Row
from tests.support.tokenizers import byte_tokenizer
from tests.tasks.evaluation.data import write_all
from tests.tasks.evaluation.models import Constant
from tests.tasks.evaluation.report.results import made_up
from tests.tasks.evaluation.test_main import _never

_CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    paths = write_all(tmp_path_factory.mktemp("data"))
    return {task: ["--task", task, "--task-data-path", str(path)] for task, path in paths.items()}


def _evaluated(argv: list[str], folder: Path) -> Path:
    assert main([*argv, "--output-dir", str(folder)], lambda args: Constant(" A")) == 0
    return folder


@pytest.mark.parametrize("flags", [(), ("--check",)])
def test_a_folder_that_cannot_be_made_is_named_before_a_model_is_loaded(asked: dict, flags: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="--output-dir /proc/there cannot be written: no file can be made in /proc"):
        main([*asked["boolq"], "--output-dir", "/proc/there", *flags], _never)


def test_a_disk_that_is_full_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"--output-dir .* cannot be written: No space left on device"),
        writing(tmp_path),
        Path("/dev/full").open("w") as full,
    ):
        full.write("x")
        full.flush()
    with pytest.raises(ConnectionError), writing(tmp_path):
        raise ConnectionResetError(104, "reset")


def test_logits_that_are_no_numbers_are_named() -> None:
    sums = _Sums([Row(inputs=(1,), targets=(2,))], None)
    with pytest.raises(UserError, match=r"logits are not numbers \(NaN\)"):
        sums.add(torch.full((1, 4), math.nan), [[(0, 2)]])


def test_an_earlier_evaluation_must_have_a_task_in_common(asked: dict, tmp_path: Path) -> None:
    before = _evaluated(asked["mmlu"], tmp_path / "before")
    argv = [*asked["boolq"], "--output-dir", str(tmp_path / "now"), "--compare"]
    with pytest.raises(UserError, match=r"--compare .* no task in common .* holds mmlu, --task names boolq"):
        main([*argv, str(before / "results.json")], _never)
    with pytest.raises(UserError, match=r"^--compare: .*nowhere: cannot be read"):
        main([*argv, str(tmp_path / "nowhere")], _never)
    (before / "samples.jsonl").write_text("[]\n")
    with pytest.raises(UserError, match=r"^--compare: .*samples.jsonl, line 1 is no sample"):
        main([*asked["mmlu"], "--output-dir", str(tmp_path / "now"), "--compare", str(before)], _never)


_BROKEN = [
    ("results.mmlu.total", None, "a whole number above 0"),
    ("results.mmlu.correct", "x", "a whole number from 0 to 60"),
    ("results.mmlu.accuracy", "a", "a number from 0 to 1"),
    ("results.mmlu.accuracy", float("nan"), "a number from 0 to 1"),
    ("results.mmlu.stderr", [], "a number that is not below 0, or null"),
    ("results.mmlu.metric", 3, "the name of a metric"),
    ("results.mmlu.metrics", [], "an object"),
    ("results.mmlu.metrics.acc", 1, "an object"),
    ("results.mmlu.subjects", [], "an object"),
    ("results.mmlu.subjects.subject_0.accuracy", True, "a number from 0 to 1"),
    ("tasks.mmlu", [], "an object"),
]


def test_fields_of_an_earlier_evaluation_are_checked_before_a_model_is_loaded(asked: dict, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    argv = [*asked["mmlu"], "--output-dir", str(tmp_path / "now"), "--compare", str(file)]
    for name, value, expected in _BROKEN:
        content, rows = made_up(1)
        part: Any = content
        *outer, last = name.split(".")
        for key in outer:
            part = part[key]
        part[last] = value
        file.write_text(json.dumps(content))
        said = f"--compare: {file}: {name} is {json.dumps(value)}, expected {expected}; name a results.json"
        with pytest.raises(UserError, match=f"^{re.escape(said)}"):
            main(argv, _never)
    for text in ("[" * 100_000, '{"format": 1, "results": {}}'):
        file.write_text(text)
        with pytest.raises(UserError, match=r"^--compare: .*expected the results.json"):
            main(argv, _never)
    content, rows = made_up(1)
    file.write_text(json.dumps(content))
    for field, wrong in (("task", []), ("subject", {}), ("index", "1"), ("prompt", 1), ("correct", {"acc": "yes"})):
        (tmp_path / "samples.jsonl").write_text(json.dumps({**rows[1], field: wrong}) + "\n")
        with pytest.raises(UserError, match=r"^--compare: .*samples.jsonl, line 1 is no sample .*; move the file away"):
            main(argv, _never)


def test_an_earlier_evaluation_that_was_asked_otherwise_is_told(
    asked: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    before = str(_evaluated(asked["mmlu"], tmp_path / "before"))
    _evaluated([*asked["mmlu"], "--compare", before], tmp_path / "same")
    assert "not asked the same" not in capsys.readouterr().out
    _evaluated([*asked["mmlu"], "--max-eval-samples", "1", "--compare", before], tmp_path / "fewer")
    assert "mmlu was not asked the same: --max-eval-samples unset there, 1 here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--task mmlu --task boolq", ["--task is given twice: the last one counts"]),
        ("--num-fewshot 1 --num-fewshot=2 --num-fewshot 3", ["--num-fewshot is given 3 times: the last one counts"]),
        ("--max-eval-samples 1 --max-eval-samples=1 --debug --debug", []),
    ],
)
def test_a_flag_that_is_given_again_is_told(flags: str, told: list[str]) -> None:
    assert list(evaluation_arguments(flags.split()).notices) == told


_ENDED = """
import os, signal, sys
from mindspeed_llm.tasks.evaluation.interruption import how_far
from mindspeed_llm.termination import tells_when_ended
with tells_when_ended(lambda: how_far(3, 9)):
    os.kill(os.getpid(), int(sys.argv[1]))
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_finished_is_told_when_it_is_ended(number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDED, str(int(number))], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.returncode == -number
    assert done.stderr.startswith("the evaluation was ended: 3 of 9 samples are finished and stored; the same command")
    assert "are not kept" in how_far(None, 9) and "begins anew" in how_far(0, 9)


def test_what_is_on_the_disk_is_counted(asked: dict, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    class Stopped(Constant):
        asked_before = 0

        def answer(self, asked, on_answer) -> None:
            if self.asked_before:
                raise KeyboardInterrupt
            self.asked_before = len(asked)
            super().answer(asked, on_answer)

    model = Stopped(" A")
    with pytest.raises(KeyboardInterrupt):
        main([*asked["mmlu"], "--output-dir", str(tmp_path)], lambda args: model)
    assert f"{model.asked_before} of 16 samples are finished and stored" in capfd.readouterr().err


def test_the_share_of_one_copy_is_called_so() -> None:
    assert progress_line(1, 4, 1.0, copies=2).startswith("answered 1 of 4 (share 1 of 2) samples, 1.00 samples/s")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MMLU", "Did you mean mmlu[?]"),
        ("human-eval", "Did you mean human_eval[?]"),
        ("mmlu,gsm8k", "parted by blanks; write --task mmlu gsm8k"),
    ],
)
def test_names_that_are_written_otherwise(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find(name)


def test_files_in_a_folder_below_are_found(tmp_path: Path) -> None:
    for name in ("test/a.csv", "dev/a.csv", "data/test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"Such files are in {tmp_path}/test: give that folder"):
        files_by_subject(tmp_path, ".csv")
    with pytest.raises(UserError, match=f"Such files are in {tmp_path}/data: give that folder"):
        one_file(tmp_path, ("test.jsonl", "*test*.jsonl"))
    with pytest.raises(UserError, match="Give the folder that holds them"):
        files_by_subject(tmp_path, ".json")


def test_the_question_itself_is_no_example(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"examples": [{"input": "1?", "target": "1"}, {"input": "2?", "target": "2"}]}')
    with pytest.raises(
        UserError, match="1 can stand in one: its file has 2 rows, and the question itself is no example"
    ):
        main(["--task", bbh.BENCHMARK.name, "--task-data-path", str(tmp_path)], _never)


def test_answers_that_leave_no_room_for_prompts(tmp_path: Path, asked: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64, **_CONFIG}))
    (tmp_path / "model.safetensors").touch()
    byte_tokenizer().save_pretrained(tmp_path)
    argv = ["--load", str(tmp_path), "--check", "--backend", "hf"]
    with pytest.raises(UserError, match=r"the model has 64 positions, .* answer of 64 tokens; make answers shorter"):
        main([*asked["gsm8k"], *argv, "--max-new-tokens", "64"])
    assert main([*asked["gsm8k"], *argv, "--max-new-tokens", "63"]) == 0
    assert main([*asked["boolq"], *argv]) == 0
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--tokenizer-name-or-path .*/empty holds no tokenizer"):
        main([*asked["boolq"], *argv, "--tokenizer-name-or-path", str(tmp_path / "empty")])
