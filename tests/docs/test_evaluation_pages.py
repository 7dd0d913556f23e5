"""The pages about scoring a model: every command runs, every flag exists, both languages say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mindspeed_llm.tasks.evaluation.arguments import COMMAND
from mindspeed_llm.tasks.evaluation.registry import BENCHMARKS
from mindspeed_llm.tasks.inference.arguments.command import surface_of
from tests.docs.evaluating import PROGRAM, scores_a_model
from tests.docs.pages import ROOT, Command, all_commands
from tests.docs.preprocessing import value_of
from tests.docs.pretraining import num_ranks
from tests.docs.workplace import make_workplace
from tests.support.pool import RankPool
from tests.tasks.evaluation.data import write_all

GUIDES = [ROOT / "docs" / language / "evaluation_guide.md" for language in ("en", "zh")]
_FOUND = [command for command in all_commands() if scores_a_model(command)]
# Pages in two languages have the same commands.
COMMANDS = list({command.words: command for command in _FOUND if command.words[0] != "bash"}.values())

pytestmark = [pytest.mark.usefixtures("logging_as_before"), pytest.mark.distributed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_workplace(tmp_path_factory.mktemp("evaluation_docs"))
    write_all(place)
    return place


@pytest.mark.parametrize("command", COMMANDS, ids=[re.sub(r"\W+", "_", one.text)[-60:] for one in COMMANDS])
def test_commands_run(command: Command, folder: Path, rank_pool: RankPool) -> None:
    ranks = num_ranks(command)
    argv = [*command.words[command.words.index(PROGRAM) + 1 :], "--max-new-tokens", "2"]
    if (place := value_of(argv, "--output-dir")) is None:
        place = "out"
        argv += ["--output-dir", place]
    row = "tests.examples.rows:evaluate_in"
    # Later commands compare with what earlier ones have written.
    assert rank_pool.run(row, ranks=ranks, folder=str(folder), argv=argv) == [0] * ranks
    assert (folder / place / "report.html").is_file()
    results = json.loads((folder / place / "results.json").read_text(encoding="utf-8"))
    assert all(task in argv for task in results["results"])
    if place == "out":
        (folder / place / "results.json").unlink()


@pytest.mark.parametrize("page", GUIDES, ids=["en", "zh"])
def test_flags_and_benchmarks_of_the_page_exist(page: Path) -> None:
    surface = surface_of(COMMAND)
    known = {flag.name for group in surface.groups for flag in group.flags} | surface.no_effect.keys() | {"--help"}
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"(?<![\w-])(--[a-z][\w-]*)", text)
    assert found and [flag for flag in found if flag not in known | {"--nproc_per_node"}] == []
    rows = dict(re.findall(r"^\| `(\w+)` \| .*\| `([\w@-]+)` \|$", text, re.MULTILINE))
    assert rows == {name: benchmark.headline for name, benchmark in BENCHMARKS.items()}


def test_scripts_exist() -> None:
    for command in _FOUND:
        if command.words[0] == "bash":
            assert (ROOT / command.words[1]).is_file()
    for page in GUIDES:
        (name,) = re.findall(r"`(evaluate_\w+\.sh)`", page.read_text(encoding="utf-8"))
        assert list((ROOT / "examples/mcore").glob(f"*/{name}"))
