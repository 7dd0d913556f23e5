"""The index of a model's weight files, `*.index.json`: which file holds which tensor."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from mindspeed_llm.errors import UserError

_MOST_SHOWN = 5


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name.

    Raises:
        UserError: the file is damaged, or names a tensor twice.
    """
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index}: not a weight index ({error!r}); expected an object with weight_map") from None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"{twice} is in it twice")
    return found


def indexed_files(index: Path) -> list[Path]:
    """The files that an index names, in the order of their names.

    Raises:
        UserError: the index is damaged, or files are missing.
    """
    names = sorted(set(read_index(index).values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(
            f"{index} names {len(names)} files, of which {len(missing)} are missing: {', '.join(missing[:_MOST_SHOWN])}"
            "; copy them into the directory"
        )
    return [index.parent / name for name in names]
