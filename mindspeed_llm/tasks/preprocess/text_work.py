"""Records of text -> token ids of whole documents, of pieces of them, or of their sentences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk
from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import BadRecord, UnusableRecord, missing_column, wrong_type
from mindspeed_llm.tasks.preprocess.sentences import load_sentence_splitter
from mindspeed_llm.tasks.preprocess.tokenizer_errors import TOKENIZER_ERRORS, not_tokenized
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from mindspeed_llm.tasks.preprocess.tokenizers.base import to_flat

EMPTY_TEXT = "empty text"
NO_TOKEN = "text that gives no token"
ONE_TOKEN = "text of one token, with nothing to predict"


@dataclass
class _Documents:
    """Documents of one key: ids end to end, tokens and sequences of each document, tokens of each sequence.

    `positions` are the numbers of their records.
    """

    positions: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    sequence_lengths: np.ndarray
    num_sequences: np.ndarray


class TextWork:
    """Records of text -> ids of documents, one key for each column, with the tokenizer's own begin token where it adds
    one.

    `text_of` gives the text of a record for a column (default: the value of the column). `append_eod` ends each
    document with the eos token, unless the tokenizer has done so. `pad_to_multiple_of` fills each document up to a
    multiple of so many tokens, with the pad token, or with the eos token where there is none. With `piece_length`
    documents are split in pieces of at most so many tokens; nothing is left out, unless `drop_single_tokens` counts
    documents of one token as skipped: where each piece is a sample of its own they have nothing to predict, while one
    that is joined with others has. `split_sentences` makes a sequence of each sentence, with `keep_newlines` together
    with the white space after it. `on_bad_record`: "error" raises UserError for a missing key or a wrong type, "skip"
    counts it.
    """

    def __init__(
        self,
        tokenizer: Any,
        columns: Sequence[str] = ("text",),
        *,
        text_of: Callable[[Record, str], str] | None = None,
        append_eod: bool = False,
        piece_length: int | None = None,
        drop_single_tokens: bool = False,
        pad_to_multiple_of: int = 1,
        split_sentences: bool = False,
        keep_newlines: bool = False,
        on_bad_record: str = "error",
    ) -> None:
        self._tokenizer = as_tokenizer(tokenizer)
        self.keys = tuple(columns)
        self._text_of = text_of or column_text
        self._piece_length, self._multiple = piece_length, pad_to_multiple_of
        self._drop_single_tokens = drop_single_tokens
        self._skips_bad = on_bad_record == "skip"
        self._keep_newlines = keep_newlines
        eos, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        self._eod_id = eos if append_eod else None
        self.pad_id = eos if pad is None else pad
        if append_eod and eos is None:
            raise UserError(
                "append_eod is set, but the tokenizer has no eos token to append; name one in its "
                "tokenizer_config.json, or leave append_eod out"
            )
        assert piece_length is None or piece_length > 1
        if pad_to_multiple_of > 1 and self.pad_id is None:
            raise UserError(
                f"pad_to_multiple_of is {pad_to_multiple_of}, but the tokenizer has neither a pad nor an eos token"
            )
        if piece_length is not None and piece_length % pad_to_multiple_of:
            raise UserError(
                f"documents are split in pieces of {piece_length} tokens, which is no multiple of pad_to_multiple_of "
                f"({pad_to_multiple_of}); choose lengths that fit"
            )
        self._sentences = load_sentence_splitter() if split_sentences else None

    @property
    def runs_in_threads(self) -> bool:
        """Whether several threads work faster than one: nearly all of the work is that of the tokenizer."""
        return self._tokenizer.runs_in_threads and self._sentences is None

    def __call__(self, records: Sequence[Record]) -> Chunk:
        skipped: list[tuple[int, str]] = []
        made = {key: self._documents(records, key, skipped) for key in self.keys}
        sizes = {} if self._sentences is None else {key: found.num_sequences for key, found in made.items()}
        return Chunk(
            {key: found.ids for key, found in made.items()},
            {key: found.sequence_lengths for key, found in made.items()},
            len(records),
            [(reason, records[position].where) for position, reason in sorted(skipped)],
            document_sizes=sizes,
        )

    def _documents(self, records: Sequence[Record], key: str, skipped: list[tuple[int, str]]) -> _Documents:
        of_key = "" if len(self.keys) == 1 else f" (key {key!r})"
        texts: list[str] = []
        positions: list[int] = []
        for position, record in enumerate(records):
            try:
                text = self._text_of(record, key)
            except (UserError, UnusableRecord) as error:
                skipped.append((position, self._reason(record, error)))
                continue
            if text.strip():
                texts.append(text)
                positions.append(position)
            else:
                skipped.append((position, EMPTY_TEXT + of_key))
        documents = self._encode(records, positions, texts, skipped)
        documents = _without(documents, documents.lengths == 0, NO_TOKEN + of_key, skipped)
        if self._eod_id is not None:
            last = documents.ids[np.cumsum(documents.lengths) - 1]
            documents = _extended(documents, (last != self._eod_id).astype(np.int64), self._eod_id)
        if self._multiple > 1:
            assert self.pad_id is not None
            documents = _extended(documents, -documents.lengths % self._multiple, self.pad_id)
        if self._piece_length is not None:
            if self._drop_single_tokens and self._sentences is None:
                documents = _without(documents, documents.lengths == 1, ONE_TOKEN + of_key, skipped)
            documents = _in_pieces(documents, self._piece_length)
        return documents

    def _encode(
        self, records: Sequence[Record], positions: list[int], texts: list[str], skipped: list[tuple[int, str]]
    ) -> _Documents:
        try:
            return self._encoded(positions, texts)
        except TOKENIZER_ERRORS:
            # One by one, to find out which.
            good = []
            for position, text in zip(positions, texts, strict=True):
                try:
                    self._encoded([position], [text])
                except TOKENIZER_ERRORS as error:
                    skipped.append((position, self._reason(records[position], not_tokenized(records[position], error))))
                else:
                    good.append((position, text))
            return self._encoded([position for position, _ in good], [text for _, text in good])

    def _encoded(self, positions: list[int], texts: list[str]) -> _Documents:
        if self._sentences is None:
            ids, lengths = self._tokenizer.encode_flat(texts)
            return _Documents(np.array(positions, np.int64), ids, lengths, lengths, np.ones(len(lengths), np.int32))
        split = [self._sentences(text, self._keep_newlines) for text in texts]
        # What the tokenizer puts around a text belongs to the document: to its first sentence.
        first = self._tokenizer.encode_batch([sentences[0] for sentences in split])
        rest = iter(
            self._tokenizer.encode_batch(
                [sentence for sentences in split for sentence in sentences[1:]], add_special_tokens=False
            )
        )
        encoded = [
            [ids for ids in (begin, *(next(rest) for _ in sentences[1:])) if ids]
            for begin, sentences in zip(first, split, strict=True)
        ]
        ids, sequence_lengths = to_flat(list(chain(*encoded)))
        lengths = np.array([sum(map(len, sentences)) for sentences in encoded], np.int32)
        return _Documents(
            np.array(positions, np.int64), ids, lengths, sequence_lengths, np.array(list(map(len, encoded)), np.int32)
        )

    def _reason(self, record: Record, error: UserError | UnusableRecord) -> str:
        """The reason to count a record by; raises UserError where its mistake is to end the work."""
        if isinstance(error, UnusableRecord):
            return str(error)
        if self._skips_bad:
            return f"bad record: {error.kind if isinstance(error, BadRecord) else error}"
        raise error if record.where in str(error) else UserError(f"{record.where}: {error}") from error


def column_text(record: Record, column: str) -> str:
    """The text of a column of a record. Raises BadRecord when the column is missing or holds something else."""
    if column not in record.data:
        raise missing_column(record, "text", column)
    text = record.data[column]
    if not isinstance(text, str):
        raise wrong_type(record, column, "text", text)
    return text


@dataclass(frozen=True)
class TextColumn:
    """`text_of` for a column that is called otherwise than the key: the key `text` of a column `body`, say."""

    column: str

    def __call__(self, record: Record, key: str) -> str:
        return column_text(record, self.column)


def _without(documents: _Documents, gone: np.ndarray, reason: str, skipped: list[tuple[int, str]]) -> _Documents:
    """Leave documents out, counted with a reason."""
    if not gone.any():
        return documents
    skipped += [(int(position), reason) for position in documents.positions[gone]]
    return _Documents(
        documents.positions[~gone],
        documents.ids[np.repeat(~gone, documents.lengths)],
        documents.lengths[~gone],
        documents.sequence_lengths[np.repeat(~gone, documents.num_sequences)],
        documents.num_sequences[~gone],
    )


def _extended(documents: _Documents, counts: np.ndarray, token_id: int) -> _Documents:
    """Append a token so many times to each document: to its last sequence."""
    ends = np.cumsum(documents.lengths, dtype=np.int64)
    sequence_lengths = documents.sequence_lengths.copy()
    sequence_lengths[np.cumsum(documents.num_sequences) - 1] += counts.astype(np.int32)
    return _Documents(
        documents.positions,
        np.insert(documents.ids, np.repeat(ends, counts), token_id),
        (documents.lengths + counts).astype(np.int32),
        sequence_lengths,
        documents.num_sequences,
    )


def _in_pieces(documents: _Documents, piece_length: int) -> _Documents:
    """Split sequences. Where one token would remain, which alone has nothing to predict, the piece before gives it a
    second one (pieces of two have none to give).
    """
    lengths = documents.sequence_lengths
    counts = -(-lengths // piece_length)
    pieces = np.full(int(counts.sum()), piece_length, dtype=np.int32)
    last = np.cumsum(counts) - 1
    pieces[last] = lengths - (counts - 1) * piece_length
    lone = last[(pieces[last] == 1) & (counts > 1)] if piece_length > 2 else last[:0]
    pieces[lone] += 1
    pieces[lone - 1] -= 1
    of_document = np.repeat(np.arange(len(documents.num_sequences)), documents.num_sequences)
    num_pieces = np.bincount(of_document, weights=counts, minlength=len(documents.num_sequences)).astype(np.int32)
    return _Documents(documents.positions, documents.ids, documents.lengths, pieces, num_pieces)
