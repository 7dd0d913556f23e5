"""Pages of reference that are generated from the code: tables in Markdown, one page for each language."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_llm.flag import Flag


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


def flag_row(flag: Flag) -> tuple[str, str, str, str]:
    """The row of a flag: its name, value, default, and what it means."""
    return code(flag.name), shown_value(flag.parsing), shown_default(flag.default), sentence(flag.doc)


def shown_value(parsing: Mapping[str, Any]) -> str:
    """What stands behind a flag that `argparse.add_argument` reads with `parsing`; nothing behind a switch."""
    metavar = parsing.get("metavar")
    if metavar is None:
        return ""
    text = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    suffix = {"+": " ...", "?": ""}.get(parsing.get("nargs"), "")
    return f"[{code(text)}]" if parsing.get("nargs") == "?" else f"{code(text)}{suffix}"


def shown_default(value: Any) -> str:
    """A default as the command line has it; nothing for that of a switch, and where there is none."""
    if value is None or isinstance(value, bool) or value == ():
        return ""
    if isinstance(value, float):
        return code(str(int(value)) if value.is_integer() else f"{value:g}")
    return code(" ".join(map(str, value)) if isinstance(value, tuple | list) else str(value))


def sentence(text: str) -> str:
    """The text with a capital at its beginning; flags and names there stay as they are."""
    return text[0].upper() + text[1:] if text.partition(" ")[0].strip(",").isalpha() else text


def code(text: str) -> str:
    """The text as code."""
    return f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
