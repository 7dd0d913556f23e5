"""Errors about data name the field of the configuration that the data came from."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.fields import all_fields

_FIRST_NAME = re.compile(r"[a-z]+\.[a-z_]+")


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Put `field` in front of a UserError that is raised inside, unless it begins with a field already."""
    try:
        yield
    except UserError as error:
        first = _FIRST_NAME.match(str(error))
        # A file may be called data.jsonl: only names that are fields count.
        if first and first[0] in all_fields():
            raise
        raise UserError(f"{field}: {error}") from error
