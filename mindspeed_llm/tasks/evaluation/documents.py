"""From the rows of a file to the documents of a subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Document, Fields
from mindspeed_llm.tasks.evaluation.rows import Row


def documents_of(
    rows: Iterable[Row], file: Path, subject: str, fields: Callable[[Row], Fields]
) -> tuple[Document, ...]:
    """The documents of a file, one for each row.

    Args:
        rows: its rows.
        file: its path, for the message.
        subject: whose questions they are.
        fields: the checked fields of a row. Raises UserError where one is not what it should be.

    Raises:
        UserError: see `fields`; also where there are no rows.
    """
    found = tuple(
        Document(subject=subject, index=index, place=row.place, fields=fields(row)) for index, row in enumerate(rows)
    )
    if not found:
        raise UserError(f"{file} holds no questions. Take it from the benchmark's own distribution again.")
    return found
