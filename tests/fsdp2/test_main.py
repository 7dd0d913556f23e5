"""The command line end to end: real processes at toy size. Few rows, since each costs seconds of imports."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mindspeed_llm.fsdp2.config import parse_command_line
from mindspeed_llm.observability.metrics_file import read_metrics
from tests.support.command_line import MODEL, RECORDS, make_workplace, single, torchrun, write_jsonl
from tests.support.pool import RankPool

CANONICAL = Path(__file__).parents[1] / "commands" / "fsdp2"
TOY_SIZE = ["--parallel.fsdp_size", "2", "--data.cutoff_len", "64", "--training.dataloader_num_workers", "0"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The workplace that every test gets a copy of."""
    folder = make_workplace(tmp_path_factory.mktemp("workplace"))
    shutil.copytree(repository / "configs" / "fsdp2", folder / "configs" / "fsdp2")
    return folder


@pytest.fixture
def workplace(original: Path, tmp_path: Path) -> Path:
    """A user's folder: model directory, data files, configs."""
    return Path(shutil.copytree(original, tmp_path / "workplace"))


def finish(process: Any) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


# --- Whole runs


def assert_complete(output: Path, text: str, steps: int) -> list[dict[str, Any]]:
    """Log lines, metrics and files of a finished run; returns the metrics of the training steps."""
    number = r"[-+]?\d+\.\d+(?:E[-+]\d+)?"
    for step in range(1, steps + 1):
        assert re.search(rf"iteration\s+{step}/\s*{steps} \|", text), text
    for pattern in (
        rf"elapsed time per iteration \(ms\): {number} \|",
        rf"lm loss: {number} \|",
        rf"grad norm: {number}",
        r"global batch size:\s+\d+ \|",
        rf"learning rate: {number} \|",
    ):
        assert len(re.findall(pattern, text)) == steps, pattern
    metrics = read_metrics(output / "metrics.jsonl")
    train = [line for line in metrics if "lm_loss" in line]
    keys = {"iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "consumed_tokens"}
    keys |= {"elapsed_ms_per_iteration", "tokens_per_second", "max_memory_allocated_gb"}
    assert [line["iteration"] for line in train] == list(range(1, steps + 1))
    for line in train:
        assert keys <= line.keys()
        assert 0 < line["lm_loss"] < 50 and line["grad_norm"] > 0
        shown = float(re.search(rf"iteration\s+{line['iteration']}/.*?lm loss: (\S+)", text).group(1))
        assert shown == pytest.approx(line["lm_loss"], rel=1e-5)
    picture = matplotlib.image.imread(output / "loss.png")
    assert picture.std() > 0
    assert list((output).rglob("events.out.tfevents*"))
    return train


def assert_export(output: Path, source: Path) -> None:
    """transformers loads the export, which is the source's model with other weights, and its tokenizer."""
    model, report = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.isfinite(tensor).all()
        assert not torch.equal(tensor, before[name]), name
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer("hello").input_ids == AutoTokenizer.from_pretrained(source)("hello").input_ids


@pytest.mark.torchrun
def test_canonical_pretraining(workplace: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [str(CANONICAL / "canonical_pretrain.yaml"), *TOY_SIZE, "--training.max_steps", "4", "--training.lr", "1e-3"]
    argv += ["--training.min_lr", "1e-3", "--data.split", "80,20,0", "--training.eval_on_start", "true"]
    code, out, err = finish(torchrun(repository, workplace, *argv))
    assert code == 0, err[-3000:]
    output = workplace / "output"
    assert_complete(output, out, 4)
    evaluations = [line for line in read_metrics(output / "metrics.jsonl") if "eval_loss" in line]
    assert [line["iteration"] for line in evaluations] == [0, 4]
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"]
    for said in ("attention: ", "RMSNorm: ", "rotary embedding: "):
        assert out.count(said) == 1
    assert_export(output, workplace / MODEL)
    # The written configuration is the one that ran: read again it says the same.
    monkeypatch.chdir(workplace)
    config = parse_command_line(argv).config
    assert parse_command_line([str(output / "run_config.yaml")]).config == config
    versions = json.loads((output / "versions.json").read_text())
    assert versions["torch"] == torch.__version__.split("+")[0] or versions["torch"] == torch.__version__
    assert {"mindspeed_llm", "python", "transformers"} <= versions.keys()
    assert not [path for path in output.rglob("*") if path.name.startswith(".hf_export")]


@pytest.mark.torchrun
def test_canonical_tuning(workplace: Path, repository: Path) -> None:
    argv = [str(CANONICAL / "canonical_tune.yaml"), *TOY_SIZE, "--data.dataset", '{"file_name":"./alpaca.parquet"}']
    argv += ["--training.max_steps", "3", "--training.lr", "1e-3", "--training.output_dir", "./tuned"]
    code, out, err = finish(torchrun(repository, workplace, *argv))
    assert code == 0, err[-3000:]
    train = assert_complete(workplace / "tuned", out, 3)
    assert [line["consumed_samples"] for line in train] == [2, 4, 6]
    assert "Traceback" not in err
    assert_export(workplace / "tuned", workplace / MODEL)
    assert not (workplace / "output").exists()


@pytest.mark.torchrun
def test_ctrl_c_leaves_what_was_learned_about_the_run(workplace: Path, repository: Path) -> None:
    argv = [str(CANONICAL / "canonical_pretrain.yaml"), *TOY_SIZE, "--training.max_steps", "100000"]
    process = torchrun(repository, workplace, *argv)
    metrics = workplace / "output" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code != 0
    text = metrics.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert text.endswith("\n") and len(lines) >= 3
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    assert matplotlib.image.imread(metrics.parent / "loss.png").std() > 0
    assert not (metrics.parent / "model.safetensors").exists()
    assert "interrupted" in err


# --- Mistakes


def valid(*argv: str) -> list[str]:
    """A small valid run on one process, with changes."""
    return [
        *("--model.model_name_or_path", str(MODEL), "--training.output_dir", "out", "--training.max_steps", "1"),
        *("--data.dataset", '{"file_name": "alpaca.jsonl"}', "--data.template", "qwen3", "--data.cutoff_len", "64"),
        *("--training.per_device_train_batch_size", "2", "--parallel.param_dtype", "fp32"),
        *argv,
    ]


def empty_data(folder: Path) -> None:
    (folder / "alpaca.jsonl").write_text("")


def no_weights(folder: Path) -> None:
    (folder / MODEL / "model.safetensors").unlink()


def long_prompts(folder: Path) -> None:
    write_jsonl(folder / "alpaca.jsonl", [{**record, "instruction": "long " * 200} for record in RECORDS])


def missing_tensor(folder: Path) -> None:
    path = folder / MODEL / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def no_tokenizer(folder: Path) -> None:
    for path in [*(folder / MODEL).glob("tokenizer*"), folder / MODEL / "chat_template.jinja"]:
        path.unlink(missing_ok=True)


def nothing(folder: Path) -> None:
    pass


WORLD_OF_4 = {"WORLD_SIZE": "4"}
# name, what is done to the workplace, arguments, environment, parts of the message
CONFIGURATION: list[tuple[str, Callable[[Path], None], list[str], dict[str, str], list[str]]] = [
    ("no configuration file", nothing, ["run.yaml"], {}, ["run.yaml", "does not exist"]),
    (
        "misspelt key",
        nothing,
        valid("--training.max_stepz", "3"),
        {},
        ["training.max_stepz", "did you mean", "training.max_steps"],
    ),
    ("text for a number", nothing, valid("--training.lr", "fast"), {}, ["training.lr", "fast"]),
    (
        "no model directory",
        nothing,
        valid("--model.model_name_or_path", "./model_from_hf/nothing"),
        {},
        ["model.model_name_or_path", "./model_from_hf/nothing"],
    ),
    ("no weights", no_weights, valid(), {}, ["model.model_name_or_path", str(MODEL)]),
    (
        "no data file",
        nothing,
        valid("--data.dataset", '{"file_name": "nothing.jsonl"}'),
        {},
        ["data.dataset", "nothing.jsonl"],
    ),
    ("empty data file", empty_data, valid(), {}, ["data.dataset", "alpaca.jsonl"]),
    (
        "no such data set",
        nothing,
        valid("--data.dataset", "alpaca_fool"),
        {},
        ["data.dataset", "alpaca_fool", "alpaca_full"],
    ),
    ("no such template", nothing, valid("--data.template", "qwen33"), {}, ["data.template", "qwen33"]),
    ("a world that is no number", nothing, valid(), {"WORLD_SIZE": "four"}, ["WORLD_SIZE", "'four'"]),
    (
        "shards that do not divide the world",
        nothing,
        valid("--parallel.fsdp_size", "3"),
        WORLD_OF_4,
        ["parallel.fsdp_size = 3", "4 = 1 x 3 + 1"],
    ),
]
# The same, with the files that the run may have written before it found out.
LATER: list[tuple[str, Callable[[Path], None], list[str], list[str]]] = [
    ("prompts that fill the sequence", long_prompts, valid(), ["cutoff_len", "alpaca.jsonl:1"]),
    (
        "a pattern without a module",
        nothing,
        valid("--parallel.fsdp_modules", "model.layer.{*}"),
        ["parallel.fsdp_modules", "model.layer.{*}", "model.layers.0"],
    ),
    (
        "a list of modules",
        nothing,
        valid("--parallel.fsdp_modules", "model.layers"),
        ["parallel.fsdp_modules", "'model.layers'", "model.layers.{*}"],
    ),
    ("weights that do not fit", missing_tensor, valid(), ["model.layers.1.mlp.up_proj.weight"]),
    ("no tokenizer", no_tokenizer, valid(), ["model.model_name_or_path", str(MODEL), "tokenizer.json"]),
]


def assert_one_message(done: Any, parts: list[str]) -> None:
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr + done.stdout
    messages = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, done.stderr
    assert [part for part in parts if part not in messages[0]] == [], messages[0]


@pytest.mark.parametrize(
    ("prepare", "argv", "variables", "parts"), [row[1:] for row in CONFIGURATION], ids=[row[0] for row in CONFIGURATION]
)
def test_a_mistake_is_answered_before_torch_is_imported(
    workplace: Path,
    repository: Path,
    prepare: Callable[[Path], None],
    argv: list[str],
    variables: dict[str, str],
    parts: list[str],
) -> None:
    prepare(workplace)
    done, imported = single(repository, workplace, *argv, **variables)
    assert_one_message(done, parts)
    assert imported == set()
    assert not (workplace / "out").exists()


@pytest.mark.parametrize(("name", "prepare", "argv", "parts"), [pytest.param(*row, id=row[0]) for row in LATER])
def test_a_mistake_that_needs_the_model_or_the_tokenizer(
    workplace: Path,
    repository: Path,
    rank_pool: RankPool,
    name: str,
    prepare: Callable[[Path], None],
    argv: list[str],
    parts: list[str],
) -> None:
    """One in a process of its own, to see the whole answer; the others as rows, whose imports are there already."""
    prepare(workplace)
    if name == "weights that do not fit":
        done, _ = single(repository, workplace, *argv)
        assert_one_message(done, parts)
    else:
        (row,) = rank_pool.run("tests.distributed.runs:train", ranks=1, argv=argv, folder=str(workplace))
        assert row["code"] == 2 and row["error"].startswith("UserError: "), row["error"]
        assert [part for part in parts if part not in row["error"]] == [], row["error"]
    # What an earlier run left there stays as it is.
    left = {path.name for path in (workplace / "out").iterdir()} if (workplace / "out").exists() else set()
    assert left <= {"dataset_cache"}


def test_a_run_that_cannot_start_leaves_the_files_of_an_earlier_one(workplace: Path, rank_pool: RankPool) -> None:
    out = workplace / "out"
    out.mkdir()
    for name in ("run_config.yaml", "versions.json", "metrics.jsonl"):
        (out / name).write_text(f"the earlier {name}")
    long_prompts(workplace)
    (row,) = rank_pool.run("tests.distributed.runs:train", ranks=1, argv=valid(), folder=str(workplace))
    assert row["code"] == 2, row["error"]
    for name in ("run_config.yaml", "versions.json", "metrics.jsonl"):
        assert (out / name).read_text() == f"the earlier {name}"


def test_check_prints_the_plan_and_writes_nothing(workplace: Path, repository: Path) -> None:
    before = sorted(path for path in workplace.rglob("*"))
    done, _ = single(repository, workplace, *valid("--check"), WORLD_SIZE="2")
    assert done.returncode == 0, done.stderr[-3000:]
    after = sorted(path for path in workplace.rglob("*") if path.name != "imported")
    assert after == before
    # Qwen3 toy: 509 x 48 twice, 4 layers of 6 x 16 and 2 x 2 x 16 heads, 3 x 48 x 88, norms of 48, 48, 16, 16.
    total = 2 * 509 * 48 + 4 * (2 * 48 * 96 + 2 * 48 * 32 + 3 * 48 * 88 + 2 * 48 + 2 * 16) + 48
    for line in (
        f"  parameters     {total:,}",
        "Ranks            2 = 1 replicas x 2 shards",
        "  global batch   4 samples = 2 ranks x 2 x 1 micro steps",
        "  tokens a step  up to 256 (sequence 64)",
        "  steps          1",
        f"  weights        {total / 2 * 4 / 1024**2:.1f} MiB",
        "The configuration is valid.",
    ):
        assert line in done.stdout, done.stdout
    assert "32 records looked at, 32 samples" in done.stdout
