"""The pages about asking a model: every command runs, every flag exists, what is printed is what is shown."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from mindspeed_llm.tasks.inference.arguments.command import surface_of
from mindspeed_llm.tasks.inference.arguments.inference import INFERENCE
from mindspeed_llm.tasks.inference.arguments.reference import reference_page
from mindspeed_llm.tasks.inference.main import main
from tests.docs.inferring import PROGRAM, asks_a_model
from tests.docs.pages import ROOT, Command, all_commands, blocks, record_files
from tests.docs.preprocessing import value_of
from tests.docs.pretraining import num_ranks
from tests.docs.workplace import make_workplace
from tests.support.pool import RankPool

GUIDES = [ROOT / "docs" / language / "inference_guide.md" for language in ("en", "zh")]
COMMANDS = [command for command in all_commands() if asks_a_model(command) and command.words[0] != "bash"]
SCRIPTS = [command for command in all_commands() if asks_a_model(command) and command.words[0] == "bash"]
ALONE = [command for command in COMMANDS if num_ranks(command) == 1 and "--serve" not in command.words]
TOGETHER = [command for command in COMMANDS if num_ranks(command) > 1]

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_workplace(tmp_path_factory.mktemp("inference_docs"))
    for name, text in record_files(GUIDES[0]).items():
        (place / name).write_text(text, encoding="utf-8")
    return place


def ids(commands: list[Command]) -> list[str]:
    return [re.sub(r"\W+", "_", command.text)[-60:] for command in commands]


def arguments(command: Command) -> list[str]:
    return [*command.words[command.words.index(PROGRAM) + 1 :], "--max-new-tokens", "4"]


def check(command: Command, folder: Path) -> None:
    """What a command has written, if it writes."""
    if (output := value_of(list(command.words), "--output-file")) is not None:
        prompts, answers = (
            [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
            for name in (value_of(list(command.words), "--prompt-file") or "", output)
        )
        assert len(answers) == len(prompts) > 1
        assert [row["prompt"] for row in answers if row["prompt"] in [p.get("prompt") for p in prompts]]
        (folder / output).unlink()


@pytest.mark.parametrize("command", ALONE, ids=ids(ALONE))
def test_alone(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello?\n/exit\n"))
    assert main(arguments(command)) == 0
    out = capsys.readouterr().out
    if "chat" in command.words:
        assert "You >> MindSpeed-LLM: " in out
    elif "--output-file" not in command.words:
        assert f"You:\n{value_of(list(command.words), '--prompt')}\n\nMindSpeed-LLM:\n" in out
    check(command, folder)


@pytest.mark.distributed
@pytest.mark.parametrize("command", TOGETHER, ids=ids(TOGETHER))
def test_together(command: Command, folder: Path, rank_pool: RankPool) -> None:
    ranks = num_ranks(command)
    row = "tests.examples.rows:infer_in"
    assert rank_pool.run(row, ranks=ranks, folder=str(folder), argv=arguments(command)) == [0] * ranks
    check(command, folder)


@pytest.mark.parametrize("command", SCRIPTS, ids=ids(SCRIPTS))
def test_script_exists(command: Command) -> None:
    assert (ROOT / command.words[1]).is_file()


@pytest.mark.parametrize("page", GUIDES, ids=["en", "zh"])
def test_flags_of_the_page_exist(page: Path) -> None:
    surface = surface_of(INFERENCE)
    known = {flag.name for group in surface.groups for flag in group.flags} | surface.no_effect.keys()
    # Of the other backend's training.
    known |= {"--save", "--save-model-type"}
    found = re.findall(r"`(--[a-z][\w-]*)", page.read_text(encoding="utf-8"))
    assert found and [flag for flag in found if flag not in known] == []


def test_the_excerpt_is_as_it_is_printed() -> None:
    [shown] = blocks(GUIDES[0], "text")
    from mindspeed_llm.tasks.inference.answering import TITLES

    assert f" {TITLES['greedy']} ".center(46, "=") in shown


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_reference_is_up_to_date(language: str) -> None:
    page = ROOT / "docs" / language / "inference_arguments.md"
    assert page.read_text(encoding="utf-8") == reference_page(language), (
        f"{page} is stale; run python -m mindspeed_llm.tasks.inference.arguments.reference"
    )
