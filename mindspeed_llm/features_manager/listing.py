"""The table of `--list-features`: in a terminal drawn, elsewhere plain lines that `grep` and `cut` can take apart."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from mindspeed_llm.features_manager.manager import ListedFeature

_HEADER = ("feature", "flags", "state", "sets", "patches")


def print_features(rows: Sequence[ListedFeature], stream: TextIO | None = None) -> None:
    """Print one row for each feature: name, flags, on or off, the arguments it sets, the targets it patches.

    The targets of a feature that is off are those that it would patch. Not in a terminal: a header and one line for
    each feature, its columns separated by tabs, `-` where one is empty.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        print(*_HEADER, sep="\t", file=stream)
        for row in rows:
            print(*(" ".join(cell) or "-" for cell in _cells(row)), sep="\t", file=stream)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*_HEADER, show_lines=True)
    for row in rows:
        table.add_row(*(Text("\n".join(cell)) for cell in _cells(row)), style="" if row.is_on else "dim")
    Console(file=stream).print(table)


def _cells(row: ListedFeature) -> tuple[Sequence[str], ...]:
    return ((row.name,), row.flags, ("on" if row.is_on else "off",), row.settings, row.targets)
