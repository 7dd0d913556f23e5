"""The scripts that evaluate with the Megatron backend: each passes the checks at full size, one scores a toy."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from mindspeed_llm.tasks.evaluation.main import main
from tests.examples.mcore_models import TOY_FLAGS, save_config, save_toy_directory
from tests.examples.test_mcore_generate import GENERATING, example_of
from tests.examples.test_mcore_pretrain import (  # noqa: F401 (workplace is a fixture)
    header_command,
    run_script,
    workplace,
)
from tests.support.pool import RankPool
from tests.tasks.evaluation.data import write_mmlu

PROGRAM = "evaluation.py"
FOLDER = Path("examples/mcore")
EVALUATING = {stem.replace("/generate_", "/evaluate_"): stem for stem in GENERATING}
AT_TOY_SIZE = "qwen3/evaluate_qwen3_8b_ptd"

pytestmark = pytest.mark.usefixtures("logging_as_before")


def split_launch(words: list[str]) -> tuple[int, list[str]]:
    """The number of ranks that torchrun starts, and the arguments of the program."""
    start = words.index(PROGRAM)
    launch = dict(zip(words[:start:2], words[1:start:2], strict=True))
    return int(launch["--nproc_per_node"]) * int(launch.get("--nnodes", "1")), words[start + 1 :]


def test_every_model_that_is_asked_has_one(repository: Path) -> None:
    folder = repository / FOLDER
    found = {str(path.relative_to(folder).with_suffix("")) for path in folder.glob("*/evaluate_*.sh")}
    assert found == EVALUATING.keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stem", EVALUATING)
def test_full_size(
    workplace: Path,  # noqa: F811
    stem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a user starts it, and as its header says; the model is planned, not loaded."""
    example, devices = example_of(EVALUATING[stem]), GENERATING[EVALUATING[stem]][0]
    write_mmlu(workplace / "mmlu")
    done, words = run_script(workplace, stem, TOKENIZER_PATH="./tokenizer")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(workplace)
    config = save_config(example, workplace / "model")
    (config / "model.safetensors").touch()
    own = ["--load", str(config), "--tokenizer-name-or-path", "./tokenizer", "--check"]
    for launch in (words, header_command(workplace / FOLDER / f"{stem}.sh")):
        ranks, argv = split_launch(launch)
        assert ranks == devices
        assert main([*argv, *own, str(ranks)]) == 0
        out = capsys.readouterr().out
        assert re.search(r"^mmlu +16 samples, subjects: 2, examples in a prompt: 5$", out, re.MULTILINE)
        assert "The arguments are valid." in out
        assert "no effect" not in out


@pytest.mark.parametrize("stem", EVALUATING)
def test_variables_of_the_header_are_those_of_the_script(repository: Path, stem: str) -> None:
    text = (repository / FOLDER / f"{stem}.sh").read_text(encoding="utf-8")
    header = " ".join(line[1:].strip() for line in text.partition("set -euo")[0].splitlines())
    named = re.search(r"Environment: (.*?)\.", header)
    assert named is not None
    assert named[1].split(", ") == re.findall(r"^([A-Z_]+)=\"\$\{\1:?-", text, re.MULTILINE)
    assert f"bash {FOLDER}/{stem}.sh" in header


@pytest.mark.distributed
def test_toy_size(workplace: Path, rank_pool: RankPool) -> None:  # noqa: F811
    """Two benchmarks on a pipeline of two ranks score as the same weights do in transformers' hands."""
    example = example_of(EVALUATING[AT_TOY_SIZE])
    save_toy_directory(example, workplace / "toy")
    write_mmlu(workplace / "mmlu")
    tasks = {"TASK": "mmlu mmlu_ppl", "DATA_PATH": "./mmlu/test/ ./mmlu/test/", "TOKENIZER_PATH": "./tokenizer"}
    common = ["--num-fewshot", "0", "--max-new-tokens", "2", "--dtype", "fp32"]
    sizes = [*shlex.split(TOY_FLAGS), *common, "--output-dir", "pipeline"]
    _, words = run_script(workplace, AT_TOY_SIZE, *sizes, CKPT_LOAD_DIR="./toy", **tasks)
    ranks, argv = split_launch([word for word in words if word != "--bf16"])
    row = "tests.examples.rows:evaluate_in"
    assert rank_pool.run(row, ranks=ranks, folder=str(workplace), argv=argv) == [0, 0]
    alone = ["--task", *tasks["TASK"].split(), "--task-data-path", *tasks["DATA_PATH"].split(), "--load", "./toy"]
    alone += ["--tokenizer-name-or-path", "./tokenizer", *common, "--output-dir", "alone"]
    assert rank_pool.run(row, ranks=1, folder=str(workplace), argv=alone) == [0]
    found, theirs = (
        [json.loads(line) for line in (workplace / name / "samples.jsonl").read_text().splitlines()]
        for name in ("pipeline", "alone")
    )
    assert len(found) == len(theirs) == 32
    for mine, other in zip(found, theirs, strict=True):
        expected = other["raw"] if isinstance(other["raw"], str) else pytest.approx(other["raw"], abs=1e-4)
        assert mine.pop("raw") == expected
        del other["raw"]
        assert mine == other
