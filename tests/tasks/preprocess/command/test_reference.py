"""The reference of the flags in the documentation is the one that the tables give."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_llm.tasks.preprocess.command.arguments import FLAGS
from mindspeed_llm.tasks.preprocess.command.parser import parse
from mindspeed_llm.tasks.preprocess.command.reference import main, reference_page
from mindspeed_llm.tasks.preprocess.command.refused import REFUSED
from mindspeed_llm.tasks.preprocess.handlers import HANDLERS

DOCS = Path(__file__).parents[4] / "docs"


def test_pages_are_up_to_date(tmp_path: Path) -> None:
    main([str(tmp_path)])
    for language in ("en", "zh"):
        name = f"{language}/preprocess_arguments.md"
        assert (DOCS / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8"), (
            f"docs/{name} is stale; run python -m mindspeed_llm.tasks.preprocess.command.reference"
        )


@pytest.mark.parametrize("language", ["en", "zh"])
def test_handlers_and_refused_flags_have_a_row(language: str) -> None:
    first_cells = [line.split("|")[1].strip() for line in reference_page(language).splitlines() if line[:1] == "|"]
    for name in (*HANDLERS, *REFUSED):
        assert first_cells.count(f"`{name}`") == 1, name


def test_defaults_are_those_of_the_parser() -> None:
    """The column of defaults says what an empty command line gives."""
    empty = parse([])
    rows = [line.strip("| ").split(" | ") for line in reference_page("en").splitlines() if line.startswith("| `--")]
    defaults = {row[0].strip("`"): row[2].strip().strip("`") for row in rows if len(row) == 4}
    assert set(defaults) == set(FLAGS)
    for flag, spec in FLAGS.items():
        value = getattr(empty, spec.name)
        shown = " ".join(value) if isinstance(value, tuple) else str(value)
        assert defaults[flag] == ("" if value in (None, False, ()) else shown), flag
