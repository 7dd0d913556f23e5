"""A look into indexed files: do their ids belong to the tokenizer and the model of this run?

Small files are read whole, of large ones stretches from all over the file. Batches are looked at as well when they are
made, so that nothing gets by; here it is found before the run starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.reuse import read_content
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.once import warn_once
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer
from mindspeed_llm.training.data.tokens import TokenRules

_STRETCH = 1 << 16
_MOST_STRETCHES = 64
_MOST_DOCUMENTS = 1000


def check_content(
    flag: str, readers: Sequence[IndexedReader], rules: TokenRules, tokenizer: Tokenizer | None = None
) -> None:
    """Look into files that `flag` names.

    Raises UserError where an id is none of the vocabulary. Warns where documents do not end with the end-of-document
    token although that matters, and where the files say that they were made with another tokenizer.
    """
    for reader in {reader.prefix: reader for reader in readers}.values():
        for ids in _stretches(reader):
            wrong = (ids < 0) | (ids >= rules.vocab_size)
            if wrong.any():
                raise UserError(
                    f"{flag}: {reader.prefix} holds token {ids[wrong][0]}, but the model's vocabulary has "
                    f"{rules.vocab_size} (--vocab-size, --padded-vocab-size); was it made with another tokenizer? "
                    "Preprocess it with the model's"
                )
        if rules.needs_eod and not any(last == rules.eod_id for last in _last_ids(reader)):
            warn_once(
                f"{flag}: {reader.prefix} has no document that ends with the end-of-document token {rules.eod_id}, so "
                "that --reset-attention-mask, --reset-position-ids and --eod-mask-loss have no effect on it; "
                "preprocess it with --append-eod, and with the tokenizer of this run"
            )
        if tokenizer is not None and _maker(reader.prefix) not in (None, tokenizer.identity()):
            warn_once(
                f"{flag}: {reader.prefix} was made with another tokenizer than the one of this run, or before its "
                "files were changed; preprocess it again if its token ids differ"
            )


def _stretches(reader: IndexedReader) -> Iterator[np.ndarray]:
    """All ids of a small file, or as many stretches as are looked at, the first and the last among them."""
    ids = reader.ids
    count = min(-(-len(ids) // _STRETCH), _MOST_STRETCHES)
    for start in np.linspace(0, max(len(ids) - _STRETCH, 0), count, dtype=np.int64).tolist():
        yield ids[start : start + _STRETCH]


def _last_ids(reader: IndexedReader) -> Iterator[int]:
    """The last id of each document, of some of them where there are many."""
    step = -(-len(reader) // _MOST_DOCUMENTS)
    for number in range(0, len(reader), step):
        if length := int(reader.lengths[number]):
            yield int(reader.get(number, length - 1)[0])


def _maker(prefix: Path) -> str | None:
    """The identity of the tokenizer that made a file, where the summary beside it says so."""
    whole = prefix.with_name("_".join(prefix.name.split("_")[:-2]) or prefix.name)
    options = read_content(whole).get("options", {})
    return options.get("tokenizer")
