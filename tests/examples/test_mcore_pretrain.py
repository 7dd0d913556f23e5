"""The pre-training scripts of the Megatron backend: each passes the checks at full size and trains a toy for real."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from mindspeed_llm.training import pretrain
from mindspeed_llm.training.main import main
from tests.examples.mcore_models import (
    EXAMPLES,
    PERIOD,
    TOY_EXPERT_FLAGS,
    TOY_FLAGS,
    Example,
    expected_loss,
    repeated_ids,
    save_config,
    save_toy_directory,
)
from tests.support.pool import RankPool, free_port
from tests.support.tokenizers import byte_tokenizer

FOLDER = Path("examples/mcore")
LENGTH = 4 * PERIOD
# Of the devices that upstream's scripts are for.
DEVICE_GIB = 64
FAKE_TORCHRUN = '#!/usr/bin/env bash\nprintf \'%s\\n\' "$@" > "$ARGUMENTS"\necho "a line"\nexit "${FAKE_EXIT:-0}"\n'
# What the short form in a script's header leaves to the defaults, and what says the same in other words. With TP the
# vocabulary is padded more, which changes nothing: padded rows are masked out.
SHORT_FORM_DIFFERS = {
    "attention_softmax_in_fp32",
    "given",
    "init_method_std",
    "model_from_hf",
    "moe_layer_freq",  # moe_layer_pattern, which follows from it, is compared
    "notices",
    "padded_vocab_size",
    "save_interval",
    "seed",
    "spec",
    "tokenizer_type",
}

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture
def workplace(tmp_path: Path, repository: Path) -> Path:
    """A copy of the examples beside data and a tokenizer, and a `torchrun` that notes its arguments."""
    shutil.copytree(repository / FOLDER, tmp_path / FOLDER)
    (tmp_path / "pretrain_gpt.py").symlink_to(repository / "pretrain_gpt.py")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text(FAKE_TORCHRUN)
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_data(tmp_path / "data")
    return tmp_path


def write_data(prefix: Path) -> None:
    """Enough for one sample of the longest length; every document begins where the stretch does."""
    with IndexedWriter(prefix) as writer:
        for _ in range(20):
            writer.add(repeated_ids(32 * PERIOD).numpy())


def run_script(
    workplace: Path, stem: str, *options: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script with the fake torchrun; the finished process, and the arguments of torchrun."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    noted = workplace / "arguments"
    done = subprocess.run(
        ["bash", str(workplace / FOLDER / f"{stem}.sh"), *options],
        env={**kept, "PATH": f"{workplace / 'bin'}:{kept['PATH']}", "ARGUMENTS": str(noted), **environment},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    return done, noted.read_text().splitlines() if noted.exists() else []


def split_launch(words: list[str]) -> tuple[int, list[str]]:
    """The number of ranks that torchrun starts, and the arguments of the program."""
    start = words.index("pretrain_gpt.py")
    launch = dict(zip(words[:start:2], words[1:start:2], strict=True))
    return int(launch["--nproc_per_node"]) * int(launch.get("--nnodes", "1")), words[start + 1 :]


def header_command(script: Path) -> list[str]:
    """The words of the short form in a script's header."""
    lines = [line[1:] for line in script.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    [command] = [line for line in text.splitlines() if line.strip().startswith("torchrun ")]
    return shlex.split(command)[1:]


def test_the_names_are_those_that_users_know(repository: Path) -> None:
    found = (repository / FOLDER).glob("*/pretrain_*.sh")
    assert sorted(str(path.relative_to(repository / FOLDER).with_suffix("")) for path in found) == sorted(EXAMPLES)


@pytest.mark.parametrize("stem", EXAMPLES)
def test_full_size(
    workplace: Path, stem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES[stem]
    done, words = run_script(workplace, stem, DATA_PATH="./data", TOKENIZER_PATH="./tokenizer")
    assert done.returncode == 0, done.stderr
    ranks, arguments = split_launch(words)
    assert ranks == example.ranks
    monkeypatch.chdir(workplace)
    if "--load" in arguments:
        Path(arguments[arguments.index("--load") + 1]).mkdir(parents=True, exist_ok=True)
    # It refuses flags that contradict the configuration.
    config = save_config(example, workplace / "model")
    assert main([*arguments, "--check", str(ranks), "--model-from-hf", str(config)]) == 0
    out = capsys.readouterr().out
    assert f"  parameters     {example.parameters:,}" in out
    assert " has no effect" not in out
    stages = re.findall(r"^  .*layers .* ([\d.]+) GiB$", out, re.MULTILINE)
    assert stages and all(float(size) < 0.9 * DEVICE_GIB for size in stages), out


@pytest.mark.parametrize("stem", EXAMPLES)
def test_the_short_form_says_the_same(workplace: Path, stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = workplace / FOLDER / f"{stem}.sh"
    _, words = run_script(workplace, stem)
    ranks, arguments = split_launch(words)
    short_ranks, short = split_launch(header_command(script))
    assert short_ranks == ranks
    folder = workplace / short[short.index("--model-from-hf") + 1]
    save_config(EXAMPLES[stem], folder)
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    seen: list[Namespace] = []
    monkeypatch.setattr(pretrain, "pretrain", lambda args, task: seen.append(args) or 0)
    for argv in (arguments, short):
        assert main(argv) == 0
    long, brief = (
        {name: os.path.normpath(value) if isinstance(value, str) else value for name, value in vars(args).items()}
        for args in seen
    )
    assert {name for name in long if long[name] != brief[name]} <= SHORT_FORM_DIFFERS


def test_a_wrong_size_would_be_noticed(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stem = "qwen3/pretrain_qwen3_8b_4K_ptd"
    config = save_config(EXAMPLES[stem], workplace / "model")
    _, words = run_script(workplace, stem, "--rotary-base", "10000", DATA_PATH="./data", TOKENIZER_PATH="./tokenizer")
    monkeypatch.chdir(workplace)
    with pytest.raises(UserError, match=r"--rotary-base 10000 \(config.json: 1e\+06\)"):
        main([*split_launch(words)[1], "--check", "8", "--model-from-hf", str(config)])


def test_environment_and_options_override_the_script(workplace: Path) -> None:
    variables = {
        **{"NPUS_PER_NODE": "2", "NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "1234"},
        **{"DATA_PATH": "a", "TOKENIZER_PATH": "b", "CKPT_LOAD_DIR": "c", "CKPT_SAVE_DIR": "d"},
        **{"TP": "3", "PP": "5", "EP": "6", "VPP": "7", "NOOP_LAYERS": "8,9"},
        **{"MBS": "10", "GBS": "11", "SEQ_LENGTH": "12", "TRAIN_ITERS": "13"},
    }
    done, words = run_script(
        workplace, "qwen3_moe/pretrain_qwen3_235b_a22b_4k_A3_ptd", "--lr", "1e-3", "--log-throughput", **variables
    )
    assert done.returncode == 0, done.stderr
    assert words[:10] == [
        "--nproc_per_node", "2", "--nnodes", "3", "--node_rank", "1", "--master_addr", "host", "--master_port", "1234",
    ]  # fmt: skip
    flags = {word: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}
    assert {
        "--data-path": "a",
        "--tokenizer-name-or-path": "b",
        "--load": "c",
        "--save": "d",
        "--tensor-model-parallel-size": "3",
        "--pipeline-model-parallel-size": "5",
        "--expert-model-parallel-size": "6",
        "--num-layers-per-virtual-pipeline-stage": "7",
        "--noop-layers": "8,9",
        "--micro-batch-size": "10",
        "--global-batch-size": "11",
        "--seq-length": "12",
        "--train-iters": "13",
        "--lr": "1e-3",
    }.items() <= flags.items()
    assert words[-1] == "--log-throughput"


@pytest.mark.parametrize("stem", EXAMPLES)
def test_variables_of_the_header_are_those_of_the_script(repository: Path, stem: str) -> None:
    text = (repository / FOLDER / f"{stem}.sh").read_text(encoding="utf-8")
    header = " ".join(line[1:].strip() for line in text.partition("set -euo")[0].splitlines())
    named = re.search(r"Environment: (.*?)\.", header)
    assert named is not None
    assert named[1].split(", ") == re.findall(r"^([A-Z_]+)=\"\$\{\1:?-", text, re.MULTILINE)
    assert f"bash {FOLDER}/{stem}.sh" in header


def test_without_weights_to_start_from(workplace: Path) -> None:
    _, words = run_script(workplace, "qwen3/pretrain_qwen3_8b_4K_ptd", CKPT_LOAD_DIR="")
    assert "--load" not in words


def test_tee_keeps_the_log_and_does_not_hide_the_exit_code(workplace: Path) -> None:
    done, _ = run_script(workplace, "qwen3/pretrain_qwen3_8b_4K_ptd", FAKE_EXIT="3")
    assert done.returncode == 3
    assert "a line" in done.stdout
    (log,) = (workplace / "logs").glob("pretrain_qwen3_8b_4K_ptd_*.log")
    assert log.read_text() == "a line\n"


def toy_options(example: Example) -> list[str]:
    return shlex.split(f"{TOY_FLAGS} {TOY_EXPERT_FLAGS.get(example.toy.name, '')} {example.toy.flags}")


def toy_environment(example: Example) -> dict[str, str]:
    return {
        "NPUS_PER_NODE": str(example.toy.ranks),
        "DATA_PATH": "./data",
        "TOKENIZER_PATH": "./toy",
        "CKPT_LOAD_DIR": "./toy",
        "CKPT_SAVE_DIR": "./ckpt",
        "GBS": "4",
        "SEQ_LENGTH": str(LENGTH),
        "TRAIN_ITERS": "2",
        **example.toy.environment,
    }


def logged(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "lm_loss" in record]


@pytest.mark.distributed
@pytest.mark.sampled(3)
@pytest.mark.parametrize("stem", EXAMPLES)
def test_toy_size(workplace: Path, stem: str, rank_pool: RankPool) -> None:
    example = EXAMPLES[stem]
    save_toy_directory(example, workplace / "toy")
    _, words = run_script(workplace, stem, *toy_options(example), **toy_environment(example))
    ranks, arguments = split_launch(words)
    codes = rank_pool.run("tests.examples.rows:pretrain_in", ranks=ranks, folder=str(workplace), argv=arguments)
    assert codes == [0] * ranks
    records = logged(workplace / "ckpt")
    assert [record["iteration"] for record in records] == [1, 2]
    # bf16 against fp32.
    assert records[0]["lm_loss"] == pytest.approx(expected_loss(example, LENGTH), rel=2e-2)
    assert (workplace / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "2"
    files = list((workplace / "ckpt" / "iter_0000002").glob("mp_rank_*/model_optim_rng.pt"))
    assert len(files) >= int(example.toy.environment.get("PP", "1"))


@pytest.mark.distributed
def test_weights_of_a_conversion(workplace: Path, rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_llm.tasks.checkpoint.main import main as convert

    stem = "qwen3/pretrain_qwen3_8b_4K_ptd"
    example = EXAMPLES[stem]
    save_toy_directory(example, workplace / "toy")
    monkeypatch.chdir(workplace)
    convert(["--load-dir", "toy", "--save-dir", "converted", "--target-pipeline-parallel-size", "2"])
    environment = {**toy_environment(example), "CKPT_LOAD_DIR": "./converted", "TRAIN_ITERS": "1"}
    sizes = [*toy_options(example), "--padded-vocab-size", "509"]
    _, words = run_script(workplace, stem, *sizes, "--no-load-optim", "--no-load-rng", **environment)
    ranks, arguments = split_launch(words)
    rank_pool.run("tests.examples.rows:pretrain_in", ranks=ranks, folder=str(workplace), argv=arguments)
    [record] = logged(workplace / "ckpt")
    assert record["lm_loss"] == pytest.approx(expected_loss(example, LENGTH), rel=2e-2)


@pytest.mark.distributed
def test_a_script_from_raw_text_and_again_with_torchrun_from_its_checkpoint(
    workplace: Path, repository: Path, rank_pool: RankPool
) -> None:
    stem = "qwen3/pretrain_qwen3_8b_4K_ptd"
    example = EXAMPLES[stem]
    save_toy_directory(example, workplace / "toy")
    text = "The quick brown fox jumps over the lazy dog. " * 8
    (workplace / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(40)))
    environment = {
        **toy_environment(example),
        "DATA_PATH": "./text.jsonl",
        "TRAIN_ITERS": "3",
    }
    _, words = run_script(workplace, stem, *toy_options(example), "--exit-interval", "2", **environment)
    ranks, arguments = split_launch(words)
    codes = rank_pool.run("tests.examples.rows:pretrain_in", ranks=ranks, folder=str(workplace), argv=arguments)
    assert codes == [0] * ranks
    launched = {
        **environment,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(repository),
        "OMP_NUM_THREADS": "1",
        "MINDSPEED_DEVICE": "cpu",
        "MASTER_PORT": str(free_port()),
        "CKPT_LOAD_DIR": "./ckpt",
    }
    done, _ = run_script(workplace, stem, *toy_options(example), **launched)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        3/       3 |" in done.stdout
    assert "Resumed from ckpt/iter_0000002 after step 2" in done.stdout
    assert [record["iteration"] for record in logged(workplace / "ckpt")] == [1, 2, 3]
