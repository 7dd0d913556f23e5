"""Pages of reference that are generated from the code: tables in Markdown, one page for each language."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]


def write_pages(page_of: Callable[[str], str], name: str, languages: Iterable[str], argv: Sequence[str]) -> None:
    """Write `page_of(language)` to `<docs>/<language>/<name>`; `argv[0]` is the folder, by default `docs`."""
    docs = Path(argv[0] if argv else "docs")
    for language in languages:
        page = docs / language / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(page_of(language), encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
