"""The pages of the Megatron backend: every command runs, every flag exists, the excerpts are what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.observability.megatron_line import format_megatron_step
from mindspeed_llm.observability.record import StepRecord
from mindspeed_llm.training.arguments.not_yet import NOT_YET
from mindspeed_llm.training.arguments.parser import make_parser
from mindspeed_llm.training.arguments.renamed import ALIASES, DEPRECATED
from mindspeed_llm.training.main import main
from tests.docs.pages import ROOT, Command, all_commands, blocks
from tests.docs.preprocessing import value_of
from tests.docs.pretraining import (
    OUTPUT,
    PRINTING,
    SHORTER,
    Pretrained,
    is_ours,
    make_mcore_workplace,
    pretrain_arguments,
)
from tests.support.pool import RankPool

LORA = [ROOT / "docs" / language / "mcore_lora.md" for language in ("en", "zh")]
GUIDES = [ROOT / "docs" / language / "mcore_guide.md" for language in ("en", "zh")]
FINETUNE = [ROOT / "docs" / language / "mcore_finetune.md" for language in ("en", "zh")]
COMMANDS = [command for command in all_commands() if is_ours(command)]
ARGUMENTS = {command.text: pretrain_arguments(command) for command in COMMANDS}
PRINTED = [command for command in COMMANDS if PRINTING & set(ARGUMENTS[command.text] or ())]
TRAINING = [command for command in COMMANDS if ARGUMENTS[command.text] is not None and command not in PRINTED]
SCRIPTS = [command for command in COMMANDS if command.words[0] == "bash"]
CONVERSIONS = [command for command in COMMANDS if command not in [*PRINTED, *TRAINING, *SCRIPTS]]
FLAGS = {name for action in make_parser(FEATURES, program="x")._actions for name in action.option_strings}
# Of the demo model, for the excerpts.
DEMO_MODEL = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)

pytestmark = pytest.mark.usefixtures("logging_as_before")


def ids(commands: list[Command]) -> list[str]:
    return [re.sub(r"\W+", "_", command.text)[-80:] for command in commands]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mcore_workplace(tmp_path_factory.mktemp("mcore_docs"))


@pytest.fixture(scope="module")
def pretrained(folder: Path, rank_pool: RankPool) -> Pretrained:
    return Pretrained(folder, COMMANDS, rank_pool)


def test_there_are_commands_of_every_kind() -> None:
    assert TRAINING and PRINTED and SCRIPTS and CONVERSIONS


@pytest.mark.parametrize("command", PRINTED, ids=ids(PRINTED))
def test_printing(command: Command, pretrained: Pretrained) -> None:
    printed = pretrained.print(command)
    if "--list-features" in command.words:
        rows = [line.split("\t") for line in printed.splitlines() if "\t" in line]
        assert [row[0] for row in rows[1:]] == [feature.name for feature in FEATURES]
        assert {row[2] for row in rows[1:]} == {"on", "off"}
    else:
        assert printed.endswith("The arguments are valid.\n")


@pytest.mark.distributed
@pytest.mark.parametrize("command", TRAINING, ids=ids(TRAINING))
def test_training(command: Command, pretrained: Pretrained) -> None:
    output, arguments = pretrained.train(command), ARGUMENTS[command.text] or []
    steps = int(value_of(arguments, "--train-iters") or 0) // SHORTER
    assert int((output / "latest_checkpointed_iteration.txt").read_text()) >= steps >= 1
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["iteration"] for record in records if "lm_loss" in record][:steps] == list(range(1, steps + 1))
    assert (output / "loss.png").is_file()
    # A run that did not go on from the checkpoint there would have moved it away.
    assert not list(output.glob("set_aside.*"))
    assert any("eval_loss" in record for record in records) == (value_of(arguments, "--eval-iters") != "0")


@pytest.mark.distributed
@pytest.mark.parametrize("command", CONVERSIONS, ids=ids(CONVERSIONS))
def test_conversion(command: Command, pretrained: Pretrained) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    pretrained.print(command)
    written = pretrained.folder / (value_of(list(command.words), "--save-dir") or "")
    if value_of(list(command.words), "--save-model-type") == "mg":
        assert list(written.glob("iter_*/mp_rank_00/model_optim_rng.pt"))
        return
    if "--save-lora-to-hf" not in command.words:
        AutoModelForCausalLM.from_pretrained(written)
        return
    base = AutoModelForCausalLM.from_pretrained(
        pretrained.folder / (value_of(list(command.words), "--hf-cfg-dir") or "")
    )
    assert PeftModel.from_pretrained(base, written).peft_config["default"].r == 8


@pytest.mark.distributed
def test_peft_loads_what_a_run_has_written(pretrained: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {body for page in LORA for body in blocks(page, "python")}
    assert found
    monkeypatch.chdir(pretrained.folder)
    for body in found:
        # The command above it, shortened.
        [run] = re.findall(rf"{OUTPUT}\w+(?=/iter_0)", body)
        [command, *_] = [each for each in TRAINING if value_of(ARGUMENTS[each.text] or [], "--save") == run]
        steps = int(value_of(ARGUMENTS[command.text] or [], "--train-iters") or 0)
        pretrained.train(command)
        names: dict[str, Any] = {}
        exec(body.replace(f"iter_{steps:07d}", f"iter_{steps // SHORTER:07d}"), names)
        halves = [value for name, value in names["model"].named_parameters() if ".lora_B." in name]
        # B begins with zeros.
        assert halves and all(half.any() for half in halves)


@pytest.mark.parametrize("command", SCRIPTS, ids=ids(SCRIPTS))
def test_script(command: Command) -> None:
    text = (ROOT / command.words[1]).read_text(encoding="utf-8")
    for variable in command.environment:
        assert re.search(rf"^{variable.partition('=')[0]}=", text, re.MULTILINE), variable
    assert {word for word in command.words[2:] if word.startswith("--")} <= FLAGS


@pytest.mark.parametrize("page", [*GUIDES, *FINETUNE, *LORA], ids=lambda page: f"{page.stem}_{page.parent.name}")
def test_flags_of_the_page_exist(page: Path) -> None:
    known = {*FLAGS, *NOT_YET, *ALIASES, *DEPRECATED}
    found = re.findall(r"`(--[a-z][\w-]*)", page.read_text(encoding="utf-8"))
    assert found and [flag for flag in found if flag not in known] == []


@pytest.mark.parametrize("page", GUIDES, ids=["en", "zh"])
def test_scripts_of_the_page_exist_and_none_is_missing(page: Path) -> None:
    named = re.findall(r"`(\w+/pretrain_\w+\.sh)`", page.read_text(encoding="utf-8"))
    there = [str(path.relative_to(ROOT / "examples/mcore")) for path in ROOT.glob("examples/mcore/*/pretrain_*.sh")]
    assert sorted(named) == sorted(there)


@pytest.fixture
def demo_model(tmp_path: Path) -> Path:
    DEMO_MODEL.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("page", GUIDES, ids=["en", "zh"])
def test_the_plan_is_what_check_prints(page: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [shown] = [body for body in blocks(page, "text") if "The arguments are valid." in body]
    [command] = [command for command in PRINTED if "--check" in command.words and "quickstart" in command.text]
    words = ARGUMENTS[command.text] or []
    own = {value_of(words, flag) for flag in ("--model-from-hf", "--load", "--train-data-path")}
    left_out = ("--load", "--train-data-path")
    rest = [word for word in words if word not in own and word not in left_out and word != "--model-from-hf"]
    assert main([*rest, "--model-from-hf", str(demo_model), "--mock-data"]) == 0
    assert capsys.readouterr().out.endswith(shown)


@pytest.mark.parametrize("page", GUIDES, ids=["en", "zh"])
def test_the_refusal_is_what_is_said(page: Path, demo_model: Path) -> None:
    [shown] = [body for body in blocks(page, "text") if body.startswith("error: ")]
    flags = "--mock-data --seq-length 256 --micro-batch-size 1 --train-iters 1 --lr 1e-5 --check 2"
    with pytest.raises(UserError) as refused:
        main(["--model-from-hf", str(demo_model), "--tensor-model-parallel-size", "2", *flags.split()])
    assert f"error: {refused.value}".split() == shown.split()


def names_in(line: str) -> list[str]:
    """The names of the fields of a log line."""
    return re.findall(r"\| ([a-z][^:|]*):", line)


@pytest.mark.parametrize("page", GUIDES, ids=["en", "zh"])
def test_the_log_line_has_the_fields_that_are_shown(page: Path) -> None:
    [shown] = [body for body in blocks(page, "text") if "lm loss" in body]
    lines = [line for line in shown.splitlines() if "lm loss" in line]
    record = StepRecord(
        iteration=1,
        consumed_samples=4,
        consumed_tokens=1024,
        elapsed_ms_per_iteration=1.0,
        learning_rate=1e-5,
        global_batch_size=4,
        lm_loss=2.5,
        grad_norm=1.0,
        max_memory_allocated_gb=1.0,
        max_memory_reserved_gb=1.0,
        tokens_per_second=1.0,
    )
    expected = names_in(format_megatron_step(record, total_steps=16))
    assert "grad norm" in expected and lines
    assert all(names_in(line) == expected for line in lines)
