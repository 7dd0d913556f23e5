"""Data sets that the `datasets` library loads by name: from the Hugging Face hub, where --input is no path."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.parser import parse_json_object
from mindspeed_llm.tasks.preprocess.hub_access import prepare_hub
from mindspeed_llm.tasks.preprocess.readers import Record

_LOG = logging.getLogger("mindspeed_llm")
_PARAMS = ("path", "name", "data_dir", "data_files", "revision", "split")
_ROWS = 1000


class HubData:
    """One split of a data set; it is loaded when first needed.

    `params` are arguments of `datasets.load_dataset`. With `streaming` rows come as they are read, else the data set is
    downloaded first.
    """

    def __init__(self, params: Mapping[str, Any], *, cache_dir: str | None, streaming: bool) -> None:
        self.params = {"split": "train", **params}
        self._cache_dir, self._streaming = cache_dir, streaming

    @property
    def name(self) -> str:
        """The name that messages show."""
        return str(self.params["path"])

    @cached_property
    def _rows(self) -> Any:
        # Other paths are builders of the library for local files.
        is_of_hub = "data_files" not in self.params and not Path(self.name).exists()
        problem = prepare_hub(f"--input {self.name}") if is_of_hub else None
        import datasets

        _LOG.info("loading data set %s with the datasets library", self.name)
        try:
            return datasets.load_dataset(**self.params, cache_dir=self._cache_dir, streaming=self._streaming)
        except Exception as error:
            # The library and what lies under it (network, parsers of the data's own metadata) have no common base.
            if problem is not None:
                raise UserError(
                    f"--input {self.name}: there is no such file or folder, the cache of the hub has no data set of "
                    f"that name, and the hub is not asked: {problem}"
                ) from error
            text = " ".join(str(error).split())[:500]
            raise UserError(
                f"--input {self.name}: there is no such file or folder, and the datasets library could not load a data "
                f"set of that name ({type(error).__name__}: {text}). Check the name, the connection, and the arguments "
                "in --hf-datasets-params"
            ) from error

    def files(self) -> list[Path]:
        """The files of the downloaded rows; none with `streaming`."""
        return [] if self._streaming else [Path(item["filename"]) for item in self._rows.cache_files]

    def num_records(self) -> int | None:
        """The number of rows; None with `streaming`."""
        return None if self._streaming else len(self._rows)

    def records(self) -> Iterator[Record]:
        """The rows in order."""
        number = 0
        for batch in self._rows.iter(batch_size=_ROWS):
            for values in zip(*batch.values(), strict=True):
                number += 1
                yield Record(Path(self.name), number, dict(zip(batch, values, strict=True)))


def read_params(file: str | None, name: str) -> dict[str, Any]:
    """The arguments in the file of --hf-datasets-params, with `name` as path unless it gives another one.

    Raises UserError: an unreadable file, or arguments that are not available.
    """
    if file is None:
        return {"path": name}
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"--hf-datasets-params {file}: cannot be read ({error.strerror})") from error
    params = parse_json_object(f"--hf-datasets-params {file}", text)
    for key in params:
        if key not in _PARAMS:
            raise UserError(
                f"--hf-datasets-params {file}: {key!r} is not available; expected some of {', '.join(_PARAMS)} "
                "(streaming and cache_dir have flags of their own)"
            )
    return {"path": name, **params}
