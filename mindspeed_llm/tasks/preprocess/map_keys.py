"""Which column of the records plays which role: --map-keys, checked against the handler and the first records."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.handlers import Handler
from mindspeed_llm.tasks.preprocess.json_stream import json_problem
from mindspeed_llm.tasks.preprocess.readers import Record

Names = dict[str, str | None]
"""Role of a column (or a tag) -> its name in the records, None where it is switched off."""


def parse_map_keys(text: str, handler: Handler) -> tuple[Names, Names]:
    """Parse the JSON of --map-keys to (columns, tags), only what is given; an empty name switches a role off.

    Raises UserError naming the flag, the key and the nearest one that the handler knows.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"--map-keys: not valid JSON ({json_problem(error)} character {error.pos + 1}): {text!r}"
        ) from error
    if not isinstance(given, dict):
        raise UserError(f'--map-keys: expected an object such as {{"prompt": "question"}}, found {text!r}')
    if not handler.columns:
        instead = "--json-keys names the columns" if handler.takes_json_keys else "dataset_info.json names the columns"
        raise UserError(f"--map-keys has no effect with --handler-name {handler.name}: {instead}; leave it out")
    tags = given.pop("tags", {}) if handler.tags else {}
    if not isinstance(tags, dict):
        raise UserError(f"--map-keys: tags: expected an object, found {json.dumps(tags)}")
    where = f"--map-keys with --handler-name {handler.name}"
    return (
        _names(where, given, (*handler.columns, *(("tags",) if handler.tags else ()))),
        _names(f"{where}: tags", tags, tuple(handler.tags)),
    )


def _names(where: str, given: Mapping[str, Any], known: Sequence[str]) -> Names:
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"{where}: unknown key {key!r}; {hint}expected some of {', '.join(known)}")
        if not isinstance(value, str) and value is not None:
            raise UserError(f"{where}: key {key!r}: expected the name of a column, found {json.dumps(value)}")
    return {key: value or None for key, value in given.items()}


def check_columns(columns: Mapping[str, str | None], records: Iterable[Record]) -> None:
    """Check that each column that --map-keys names stands in one of the first `records`.

    Raises UserError naming the nearest column: a misspelt one would be taken for a column that all records leave out.
    """
    missing = {role: column for role, column in columns.items() if column is not None}
    found: dict[str, None] = {}
    for record in records:
        if not missing:
            return
        found.update(dict.fromkeys(record.data))
        missing = {role: column for role, column in missing.items() if column not in record.data}
    for role, column in missing.items():
        near = difflib.get_close_matches(str(column), found, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"--map-keys: key {role!r}: no record has a column {column!r}; {hint}they have {', '.join(sorted(found))}"
        )
