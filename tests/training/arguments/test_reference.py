"""The reference of the flags in the documentation is the one that the tables give."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.training.arguments.not_yet import NOT_YET, NOT_YET_VALUES
from mindspeed_llm.training.arguments.parser import make_parser
from mindspeed_llm.training.arguments.reference import main, reference_page
from mindspeed_llm.training.arguments.renamed import ALIASES, DEPRECATED, ELSEWHERE

DOCS = Path(__file__).parents[3] / "docs"
LANGUAGES = ("en", "zh")


def first_cells(language: str) -> list[str]:
    return [
        line.split(" | ")[0].removeprefix("| ") for line in reference_page(language).splitlines() if line[:1] == "|"
    ]


def test_pages_are_up_to_date(tmp_path: Path) -> None:
    main([str(tmp_path)])
    for language in LANGUAGES:
        name = f"{language}/mcore_arguments.md"
        assert (DOCS / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8"), (
            f"docs/{name} is stale; run python -m mindspeed_llm.training.arguments.reference"
        )


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_flag_has_one_row(language: str) -> None:
    cells = first_cells(language)
    options = {name for action in make_parser(FEATURES, program="x")._actions for name in action.option_strings}
    single = [*options, *DEPRECATED, *ALIASES, *ELSEWHERE, *(" ".join(row) for row in NOT_YET_VALUES)]
    assert [name for name in single if cells.count(f"`{name}`") < 1] == []
    rows = "\n".join(cells)
    assert [name for name in NOT_YET if f"`{name}`" not in rows] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_feature_has_a_row_with_its_targets(language: str) -> None:
    rows = {line.split(" | ")[0]: line for line in reference_page(language).splitlines()}
    for feature in FEATURES:
        assert all(f"`{target}`" in rows[f"| {feature.name}"] for target in feature.targets)


def test_defaults_and_values_are_shown_as_they_are_typed() -> None:
    page = reference_page("en")
    assert "| `--initial-loss-scale` | `X` | `4294967296` | fp16: " in page
    assert "| `--profile-ranks` | `N` ... | `0` | Ranks that record; -1: all. |" in page
    assert "| `--check` | [`RANKS`] |  | Check everything" in page
