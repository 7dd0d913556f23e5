"""Records of text -> token ids of whole documents."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk, end_to_end
from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import missing_column
from mindspeed_llm.tasks.preprocess.tokenizer_errors import TOKENIZER_ERRORS, not_tokenized

EMPTY_TEXT = "empty text"
ONE_TOKEN = "text of one token, with nothing to predict"


class TextWork:
    """Records of text -> ids of whole documents (key `text`), with the tokenizer's own begin token where it adds one.

    `append_eod` adds the eos token to each document, unless the tokenizer has done so. With `piece_length` documents
    are split in pieces of at most that many tokens (2 or more); a piece of one token, which has nothing to predict, is
    left out.
    """

    keys: tuple[str, ...] = ("text",)

    def __init__(
        self, tokenizer: Any, *, column: str = "text", append_eod: bool = False, piece_length: int | None = None
    ) -> None:
        self._tokenizer, self._column, self._piece_length = tokenizer, column, piece_length
        assert piece_length is None or piece_length > 1
        self._eod = tokenizer.eos_token_id if append_eod else None
        if append_eod and self._eod is None:
            raise UserError("data.append_eod is true, but the tokenizer has no eos token to append")

    def __call__(self, records: Sequence[Record]) -> Chunk:
        kept, skipped = [], []
        for record in records:
            if text_of(record, self._column).strip():
                kept.append(record)
            else:
                skipped.append((EMPTY_TEXT, record.where))
        documents = self._documents(kept)
        if self._piece_length is None:
            lengths = np.array([len(ids) for ids in documents], dtype=np.int32)
        else:
            skipped += [(ONE_TOKEN, record.where) for record, ids in zip(kept, documents, strict=True) if len(ids) == 1]
            # A last piece of one token goes.
            documents = [ids[:-1] if len(ids) % self._piece_length == 1 else ids for ids in documents]
            lengths = _piece_lengths([len(ids) for ids in documents], self._piece_length)
        return Chunk({"text": end_to_end(documents)}, {"text": lengths}, len(records), skipped)

    def _documents(self, records: Sequence[Record]) -> list[list[int]]:
        if not records:
            return []
        try:
            documents = self._encode([record.data[self._column] for record in records])
        except TOKENIZER_ERRORS:
            for record in records:
                try:
                    self._encode([record.data[self._column]])
                except TOKENIZER_ERRORS as error:
                    raise not_tokenized(record, error) from error
            raise
        if self._eod is None:
            return documents
        return [ids if ids and ids[-1] == self._eod else [*ids, self._eod] for ids in documents]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]


def text_of(record: Record, column: str) -> str:
    """The text of a record; raises UserError when the column is missing or holds something else."""
    if column not in record.data:
        raise missing_column(record, "text", column)
    text = record.data[column]
    if not isinstance(text, str):
        shown = "null" if text is None else type(text).__name__
        raise UserError(f"{record.where}: key {column!r}: expected text, found {shown}")
    return text


def _piece_lengths(lengths: Sequence[int], piece_length: int) -> np.ndarray:
    pieces: list[int] = []
    for length in lengths:
        whole, rest = divmod(length, piece_length)
        pieces += [piece_length] * whole + ([rest] if rest else [])
    return np.array(pieces, dtype=np.int32)
