"""The same results on any number of ranks, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import lm_eval_tasks
from tests.support.command_line import environment
from tests.support.pool import RankPool
from tests.tasks.evaluation.data import write_all, write_mmlu
from tests.tasks.evaluation.rows import evaluate, files, write_model

ROW = "tests.tasks.evaluation.rows:evaluate"
WITH_LM_EVAL = "tests.tasks.evaluation.rows:evaluate_with_lm_eval"
TASKS = ("mmlu_ppl", "boolq", "gsm8k")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_results_do_not_depend_on_the_number_of_ranks(tmp_path: Path, model: Path, rank_pool: RankPool) -> None:
    """Bit for bit, numbers of samples included: four blocks are one for each of four copies."""
    paths = write_all(tmp_path / "data")
    argv = ["--task", *TASKS, "--task-data-path", *(str(paths[task]) for task in TASKS), "--load", str(model)]
    argv += ["--num-fewshot", "0", "--max-new-tokens", "8", "--evaluation-batch-size", "4", "--output-dir"]
    found = {}
    for ranks in (1, 2, 4):
        rank_pool.run(ROW, ranks=ranks, argv=[*argv, str(tmp_path / str(ranks))])
        found[ranks] = files(tmp_path / str(ranks))
    assert found[1] == found[2] == found[4]
    results = json.loads(found[1][0])["results"]
    assert {task: results[task]["total"] for task in TASKS} == {"mmlu_ppl": 16, "boolq": 8, "gsm8k": 8}
    # A model that says the same everywhere would be equal on all ranks as well.
    assert len({tuple(row["raw"]) for row in found[1][1] if row["task"] == "mmlu_ppl"}) == 16
    assert not any((tmp_path / str(ranks) / "unfinished").exists() for ranks in (1, 2, 4))


# What a copy is cut into, and ranks for one copy or for two.
CUTS: dict[str, tuple[list[str], tuple[int, ...]]] = {
    "TP2": (["--tensor-model-parallel-size", "2"], (2, 4)),
    "PP2": (["--pipeline-model-parallel-size", "2"], (2,)),
}


@pytest.mark.distributed
@pytest.mark.parametrize("cut", CUTS)
def test_megatron_scores_as_transformers_does(tmp_path: Path, model: Path, rank_pool: RankPool, cut: str) -> None:
    paths = write_all(tmp_path / "data")
    argv = ["--task", *TASKS, "--task-data-path", *(str(paths[task]) for task in TASKS), "--load", str(model)]
    argv += ["--num-fewshot", "0", "--max-new-tokens", "8", "--evaluation-batch-size", "4", "--output-dir"]
    flags, numbers = CUTS[cut]
    evaluate([*argv, str(tmp_path / "hf")])
    _, wanted = files(tmp_path / "hf")
    found = []
    for ranks in numbers:
        folder = tmp_path / f"megatron_{ranks}"
        rank_pool.run(ROW, ranks=ranks, argv=[*argv, str(folder), "--backend", "megatron", *flags])
        found.append(files(folder))
    assert all(other == found[0] for other in found)
    rows = found[0][1]
    assert [{**row, "raw": None} for row in rows] == [{**row, "raw": None} for row in wanted]
    for mine, other in zip(rows, wanted, strict=True):
        if isinstance(other["raw"], str):
            assert mine["raw"] == other["raw"]
        else:
            assert mine["raw"] == pytest.approx(other["raw"], rel=0, abs=1e-4)


@pytest.mark.distributed
def test_tasks_of_lm_eval_on_a_megatron_model_of_two_ranks(tmp_path: Path, model: Path, rank_pool: RankPool) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra: eval)")
    data, tasks = tmp_path / "data", tmp_path / "tasks"
    write_mmlu(data / "mmlu")
    gsm8k = write_all(data)["gsm8k"]
    (name, *_) = lm_eval_tasks.write_mmlu(data / "mmlu", tasks)
    names = [name, *lm_eval_tasks.write_gsm8k(gsm8k / "test.jsonl", gsm8k / "train.jsonl", tasks)]
    argv = ["--load", str(model), "--tasks", *names, "--include-path", str(tasks), "--num-fewshot", "0"]
    argv += ["--limit", "3", "--output-dir"]
    flags = ["--backend", "megatron", "--tensor-model-parallel-size", "2"]
    found = []
    for ranks, more in ((1, []), (2, flags)):
        output = tmp_path / str(ranks)
        rank_pool.run(
            "tests.tasks.evaluation.rows:evaluate_with_lm_eval", ranks=ranks, argv=[*argv, str(output), *more]
        )
        files = [(output / f"samples_{task}.jsonl").read_text().splitlines() for task in names]
        found.append([[json.loads(line) for line in lines] for lines in files])
    for one, two in zip(*found, strict=True):
        assert len(one) == len(two) >= 3
        for alone, shared in zip(one, two, strict=True):
            assert alone["arguments"] == shared["arguments"]
            if isinstance(alone["resps"][0][0], str):
                assert alone["resps"] == shared["resps"]
            else:
                logprobs = [[float(response[0][0]) for response in side["resps"]] for side in (alone, shared)]
                assert logprobs[0] == pytest.approx(logprobs[1], rel=0, abs=1e-4) and len(logprobs[0]) == 4


def test_ranks_are_waited_for_beyond_the_timeout_of_collectives(rank_pool: RankPool) -> None:
    """Copies end at different times, and the rank that judges lets the others of its copy wait."""
    found = rank_pool.run("tests.tasks.evaluation.rows:wait_for_the_last", ranks=2)
    assert [everywhere for _, everywhere, _ in found] == [[0, 1], [0, 1]]
    assert [on_first for on_first, _, _ in found] == [[0, 1], []]
    assert found[1][2] >= found[0][2]


def test_a_killed_evaluation_goes_on(
    tmp_path: Path, model: Path, repository: Path, capsys: pytest.CaptureFixture
) -> None:
    subjects = [f"subject_{number:02d}" for number in range(20)]
    data = write_mmlu(tmp_path / "mmlu", subjects=subjects, count=8)
    argv = ["--task", "mmlu_ppl", "--task-data-path", str(data), "--load", str(model), "--num-fewshot", "1"]
    command = [sys.executable, str(repository / "evaluation.py"), *argv, "--output-dir", str(tmp_path / "out")]
    output = (tmp_path / "log").open("w")
    killed = subprocess.Popen(command, env=environment(repository), stdout=output, stderr=output)
    try:
        unfinished = tmp_path / "out" / "unfinished"
        deadline = time.monotonic() + 180
        while not (found := list(unfinished.glob("*.jsonl"))) or found[0].read_bytes().count(b"\n") < 4:
            assert killed.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        output.close()
    assert not (tmp_path / "out" / "results.json").exists()
    (file,) = unfinished.glob("*.jsonl")
    done = sum(len(json.loads(line).get("samples", ())) for line in file.read_bytes().split(b"\n")[:-1])
    assert 0 < done < 160
    with file.open("ab") as stream:  # as if the kill had come within a line
        stream.write(b'{"samples": [{"subject": "subject_19", "index": 0, "raw": [0.0, -9')

    evaluate([*argv, "--output-dir", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert f"mmlu_ppl: {done} samples of an earlier run are finished" in printed
    assert f"answered {160 - done} of {160 - done} samples" in printed
    evaluate([*argv, "--output-dir", str(tmp_path / "whole")])
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert not unfinished.exists()
