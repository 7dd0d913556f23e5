"""Every command of the documentation is run, or checked as far as this machine can; an unknown one fails.

Training commands run in a folder where toy models and small data stand under the names that the pages use
(workplace.py): once as written with `--check`, for as many ranks as they ask for, and once for real on 1 or 2 ranks,
shortened by `SHORTER`. Preprocessing and conversions run there as they are. Commands that install or need an
accelerator, and benchmarks (tests/benchmarks runs these), are parsed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import workplace
from tests.docs.conversion import Converted, conversion_arguments
from tests.docs.evaluating import scores_a_model
from tests.docs.inferring import asks_a_model
from tests.docs.pages import PAGES, ROOT, Command, all_commands, blocks, yaml_files
from tests.docs.preprocessing import Preprocessed, preprocess_arguments, value_of
from tests.docs.pretraining import OUTPUT, is_ours
from tests.support.pool import RankPool

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

# Those of the Megatron backend: test_mcore_pages.py; those that ask a model: test_inference_pages.py; those that score
# one: test_evaluation_pages.py.
COMMANDS = [
    command for command in all_commands() if not (is_ours(command) or asks_a_model(command) or scores_a_model(command))
]
# Appended to a training command that is run for real; the last of equal options counts.
SHORTER = [
    "--training.max_steps=2",
    "--training.per_device_train_batch_size=1",
    "--training.gradient_accumulation_steps=1",
    "--training.dataloader_num_workers=0",
    "--data.cutoff_len=64",
    "--data.max_samples=8",
    "--data.preprocessing_num_workers=1",
]
# Where the shortened samples do not reach the evaluation part of the command.
VAL_SIZE = "--data.val_size=2"
# Nothing to run on a machine without that hardware, or before an environment exists.
AS_THEY_STAND = {
    "source .venv/bin/activate",
    "python3 -m venv .venv",
    "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
}


def ids(commands: list[Command]) -> list[str]:
    return [re.sub(r"\W+", "_", command.text)[:80] for command in commands]


def training_arguments(command: Command) -> list[str] | None:
    """The arguments of train_fsdp2.py, or None when the command does not train."""
    words = [workplace.ABSOLUTE_PATHS.get(word, word) for word in command.words]
    for path, relative in workplace.ABSOLUTE_PATHS.items():
        words = [word.replace(path, f"{{}}/{relative}") for word in words]
    if "train_fsdp2.py" not in words or "--list-checkpoints" in words:
        return None
    return words[words.index("train_fsdp2.py") + 1 :]


def ranks(command: Command) -> int:
    """The number of ranks that torchrun starts on all nodes; without torchrun WORLD_SIZE, or 1."""
    count = int(dict(variable.split("=", 1) for variable in command.environment).get("WORLD_SIZE", "1"))
    for option in ("--nproc_per_node", "--nnodes"):
        if option in command.words:
            count *= int(command.words[command.words.index(option) + 1])
    return count


NO_TRAINING = {"--check", "--help"}
TRAINING = [
    command for command in COMMANDS if training_arguments(command) is not None and not NO_TRAINING & set(command.words)
]
CHECKED = [command for command in COMMANDS if training_arguments(command) not in (None, ["--help"])]
PREPROCESSING = [command for command in COMMANDS if preprocess_arguments(command) not in (None, ["--help"])]
CONVERSIONS = [command for command in COMMANDS if conversion_arguments(command) is not None]
OTHERS = [
    command
    for command in COMMANDS
    if training_arguments(command) is None and command not in [*PREPROCESSING, *CONVERSIONS]
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workplace.make_workplace(tmp_path_factory.mktemp("docs"))


def in_folder(arguments: list[str], folder: Path) -> list[str]:
    return [argument.replace("{}/", f"{folder}/") for argument in arguments]


class Trained:
    """Runs each training command at most once, and knows which command makes a folder that a later one reads."""

    def __init__(self, folder: Path, pool: RankPool, preprocessed: Preprocessed) -> None:
        self.folder, self.pool, self.preprocessed = folder, pool, preprocessed
        self.done: set[str] = set()

    def run(self, command: Command) -> None:
        if command.text in self.done:
            return
        self.preprocessed.provide(command.text)
        count = min(ranks(command), 2)
        arguments = [*in_folder(training_arguments(command) or [], self.folder), *SHORTER]
        if re.search("(tune|lora|dpo)_smollm2", command.text):
            arguments.append(VAL_SIZE)
        if "--parallel.fsdp_size" in arguments:
            arguments += ["--parallel.fsdp_size", str(count)]
        assert self.pool.run(
            "tests.docs.rows:train_in", ranks=count, draw=True, folder=str(self.folder), argv=arguments
        )
        self.done.add(command.text)

    def output(self, path: str) -> Path:
        """The output folder `path`, trained by the first command of the pages that writes it."""
        for command in TRAINING:
            if _output_dir(command) == path:
                self.run(command)
                return self.folder / path
        raise AssertionError(f"no command of the pages writes {path}")


def _output_dir(command: Command) -> str:
    import yaml

    if "--training.output_dir" in command.words:
        return command.words[command.words.index("--training.output_dir") + 1]
    name = (training_arguments(command) or [])[0]
    text = yaml_files().get(name) or (ROOT / name).read_text(encoding="utf-8")
    return yaml.safe_load(text)["training"]["output_dir"]


@pytest.fixture(scope="module")
def preprocessed(folder: Path) -> Preprocessed:
    return Preprocessed(folder, PREPROCESSING, workplace.ABSOLUTE_PATHS)


@pytest.fixture(scope="module")
def converted(folder: Path) -> Converted:
    return Converted(folder, CONVERSIONS)


@pytest.fixture(scope="module")
def trained(folder: Path, rank_pool: RankPool, preprocessed: Preprocessed) -> Trained:
    return Trained(folder, rank_pool, preprocessed)


@pytest.mark.parametrize("command", CHECKED, ids=ids(CHECKED))
def test_check(
    command: Command,
    folder: Path,
    preprocessed: Preprocessed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mindspeed_llm.fsdp2.main import main

    preprocessed.provide(command.text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WORLD_SIZE", str(ranks(command)))
    arguments = in_folder(training_arguments(command) or [], folder)
    assert main(list(dict.fromkeys([*arguments, "--check"]))) == 0
    assert "parameters" in capsys.readouterr().out


@pytest.mark.distributed
@pytest.mark.parametrize("command", TRAINING, ids=ids(TRAINING))
def test_train(command: Command, trained: Trained) -> None:
    if ranks(command) > 8:
        pytest.skip("more than one node: the same command as for one node, checked for its ranks by test_check")
    trained.run(command)
    output = trained.folder / _output_dir(command)
    # A run with adapters exports these.
    assert (output / "model.safetensors").is_file() or (output / "adapter_config.json").is_file()
    assert (output / "loss.png").is_file()


@pytest.mark.parametrize("command", PREPROCESSING, ids=ids(PREPROCESSING))
def test_preprocess(command: Command, preprocessed: Preprocessed) -> None:
    printed, arguments = preprocessed.run(command), preprocess_arguments(command) or []
    prefix = value_of(arguments, "--output-prefix")
    if page := value_of(arguments, "--html"):
        assert "<mark" in (preprocessed.folder / page).read_text(encoding="utf-8")
    elif prefix is None:
        assert re.search(r"sample 0 .* tokens", printed)
    elif "--check" in arguments:
        assert "first records" in printed
    else:
        summary = json.loads((preprocessed.folder / f"{prefix}_summary.json").read_text(encoding="utf-8"))
        assert summary["num_samples"] > 0
        assert bool(summary["skipped"]) == ("--on-bad-record" in arguments)
        kind = "" if summary["kind"] == "pretrain" else "packed_"
        for key in summary["keys"]:
            assert (preprocessed.folder / f"{prefix}_{kind}{key}_document.idx").is_file()


@pytest.mark.parametrize("command", CONVERSIONS, ids=ids(CONVERSIONS))
def test_convert(command: Command, converted: Converted) -> None:
    printed, arguments = converted.run(command), conversion_arguments(command) or []
    output = converted.folder / (value_of(arguments, "--save-dir") or "")
    if "--dry-run" in arguments:
        assert " <- model." in printed and "nothing was written (--dry-run)" in printed
        assert not output.exists()
        return
    assert f"verified   {value_of(arguments, '--verify') or 'sample'}: " in printed
    report = json.loads((output / "conversion_report.json").read_text(encoding="utf-8"))
    assert all((output / name).stat().st_size == file["bytes"] for name, file in report["output"]["files"].items())
    if value_of(arguments, "--save-model-type") != "hf":
        assert (output / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8") == "1"
    elif "--save-lora-to-hf" in arguments:
        assert (output / "adapter_model.safetensors").is_file() and (output / "adapter_config.json").is_file()
    else:
        assert (output / "model.safetensors").is_file() and (output / "tokenizer.json").is_file()


_EXCERPT = re.compile(
    r"(converted|read|how|written|verified|report) {2,}"  # the summary
    r"|iter_0000001/mp_rank_00/| {2,}model/| {40,}\+ "  # the table of --dry-run
)


def test_what_conversions_print(converted: Converted) -> None:
    """The excerpts of the page are what its commands print here; times and memory are of another day."""
    printed = {" ".join(line.split()) for command in CONVERSIONS for line in converted.run(command).splitlines()}
    shown = [
        " ".join(line.split())
        for page in PAGES
        for body in blocks(page, "text")
        for line in body.splitlines()
        if re.match(
            r"(converted|read|how|written|verified|report) {2,}| {2,}model/| {40,}\+ |iter_0000001/mp_rank_00/", line
        )
    ]
    assert len(shown) == 2 * 11
    assert [line for line in shown if line not in printed] == []


@pytest.mark.distributed
@pytest.mark.parametrize("command", OTHERS, ids=ids(OTHERS))
def test_other_command(command: Command, trained: Trained) -> None:
    words = list(command.words)
    if command.text in AS_THEY_STAND:
        return
    match words:
        case ["bash", script, *arguments]:
            check_script(script, arguments, command.environment)
        case ["pip", "install", *arguments]:
            check_pip(arguments)
        case ["python", "-c", code]:
            compile(code, "command", "exec")
        case ["python", "scripts/show_run.py", run, *_]:
            trained.output(run)
            result = run_python(words[1:], trained.folder)
            assert re.search(r"^eval loss after +\d", result, re.MULTILINE)
        case ["python", "train_fsdp2.py", "--list-checkpoints", run]:
            trained.output(run)
            assert "whole, latest" in run_python(words[1:], trained.folder)
        case ["python", "-m", "mindspeed_llm.fsdp2.checkpoint.merge_dcp_to_hf", "--load-dir", checkpoint, *_]:
            run = Path(checkpoint).parents[1]
            written = sorted((trained.output(str(run)) / "checkpoints").glob("global_step_*"))[-1]
            merged = [*words[1:4], str(written), *words[5:]]
            run_python(merged, trained.folder)
            assert (trained.folder / words[words.index("--save-dir") + 1] / "model.safetensors").is_file()
        case ["python", "-m", module, *arguments] if module.startswith("benchmarks."):
            check_benchmark(module, arguments)
        case ["torchrun", "--nproc_per_node", _, "-m", module, *arguments] if module.startswith("benchmarks."):
            check_benchmark(module, arguments)
        case ["python", "-m", "pytest", *_] | ["python", "-m", "mindspeed_llm.tasks.checkpoint.reference"]:
            pass  # tests/docs/test_conversion.py does what they do
        case ["python", "preprocess_data.py", "--help"]:
            assert "--input" in run_python(words[1:], trained.folder)
        case ["python", script, *_] if script.startswith("scripts/"):
            run_python(words[1:], trained.folder)
        case ["tensorboard", "--logdir", run]:
            assert shutil.which("tensorboard", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            assert list(trained.output(run).rglob("events.out.tfevents.*"))
        case _:
            pytest.fail(
                f"{command.page}: nothing here knows how to check {command.text!r}; teach it or test the command"
            )


def run_python(arguments: list[str], folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def check_script(script: str, arguments: list[str], environment: tuple[str, ...]) -> None:
    """The script exists, its help names all that the command uses, and asking for help is no error."""
    result = subprocess.run(["bash", script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    for word in [*arguments, *(variable.partition("=")[0] for variable in environment)]:
        known = result.stdout + (ROOT / "scripts/common.sh").read_text(encoding="utf-8")
        assert word in known, f"{script} does not know {word}"


def check_benchmark(module: str, arguments: list[str]) -> None:
    """The benchmark's help names every option that the command uses."""
    printed = io.StringIO()
    before = sys.argv
    sys.argv = [module, "--help"]
    try:
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__")
    finally:
        sys.argv = before
    assert not end.value.code
    known = set(re.findall(r"--[a-z][a-z-]*", printed.getvalue()))
    for word in arguments:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{module} does not know {word}"


def check_pip(arguments: list[str]) -> None:
    """Requirements parse, named extras exist, and torch and torch_npu have the same number."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = {}
    for argument in arguments:
        if extras := re.fullmatch(r"\.\[(.+)\]", argument):
            assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
        elif argument not in ("-e", ".", "--no-deps"):
            requirement = Requirement(argument)
            requirements[requirement.name] = str(requirement.specifier)
    if "torch_npu" in requirements:
        assert requirements["torch_npu"] == requirements["torch"] + ".*"


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--inptu x", "did you mean --input"), ("--input missing.jsonl --output-prefix x", "does not exist")],
)
def test_a_wrong_preprocessing_command_is_noticed(flags: str, message: str, folder: Path) -> None:
    from mindspeed_llm.errors import UserError
    from tests.docs.pages import split_commands

    (command,) = split_commands("page.md", f"python preprocess_data.py {flags}")
    with pytest.raises(UserError, match=message):
        Preprocessed(folder, [command], {}).run(command)


def test_help_within_two_seconds_and_without_torch(folder: Path) -> None:
    assert any(command.text == "python train_fsdp2.py --help" for command in COMMANDS)
    code = (
        "import runpy, sys\nsys.argv = ['train_fsdp2.py', '--help']\n"
        "try:\n    runpy.run_path('train_fsdp2.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    assert "model_name_or_path" in run_python(["-c", code], folder)


@pytest.mark.distributed
def test_python_blocks(trained: Trained) -> None:
    # What needs a server runs in tests/tasks/inference/serve/test_page.py.
    found = {
        body: page
        for page in PAGES
        for body in blocks(page, "python")
        if OUTPUT not in body and "http://127.0.0.1" not in body
    }
    assert found
    for body in found:
        for path in re.findall(r'from_pretrained\("([^"]+)"\)', body):
            trained.output(path)
        trained.preprocessed.provide(body)
    # One after the other in one process, each with names of its own: most of the time goes into imports.
    run_python(["-c", "\n".join(f"exec({body!r}, {{}})" for body in found)], trained.folder)


@pytest.mark.parametrize(
    ("bash", "message"),
    [
        ("frobnicate --all", "nothing here knows"),
        ("bash scripts/test.sh --frobnicate", "does not know"),
        ("python -m benchmarks.peaks --frobnicate", "does not know"),
    ],
)
def test_an_unknown_command_is_noticed(bash: str, message: str) -> None:
    from tests.docs.pages import split_commands

    (command,) = split_commands("page.md", bash)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        test_other_command(command, None)  # type: ignore[arg-type]
