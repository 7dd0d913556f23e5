"""Instruction data, preference pairs and prompts on disk: one sample is a row of several indexed files.

alpaca_packed_input_ids_document        5 6 7 8 | 5 9
alpaca_packed_attention_mask_document   1 1 2 2 | 1 0      numbers of segments with neat packing, else ones
alpaca_packed_labels_document           - 6 - 8 | - 9      not shifted; '-' is -100
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.handlers import SAMPLE_KEYS, Kind
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, indexed_exists
from mindspeed_llm.tasks.preprocess.prefix_kinds import describe
from mindspeed_llm.tasks.preprocess.sample_store import key_prefix
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX

_MASK = "attention_mask"
_BLOCK = 1 << 22


class SampleSet:
    """The samples under a prefix; sample i is a mapping key -> numbers, int64.

    `kind` is instruction, pairwise or prompt; `additional_keys` are read as well. An attention mask is read where there
    is one. Raises UserError where the prefix holds data of another kind, or where its files do not belong together.
    """

    def __init__(self, prefix: str | Path, kind: Kind, *, additional_keys: Sequence[str] = ()) -> None:
        self.prefix, self.kind = Path(prefix), kind
        needed = [key for key in SAMPLE_KEYS[kind] if not key.endswith(_MASK)]
        missing = [key for key in (*needed, *additional_keys) if not indexed_exists(key_prefix(prefix, key))]
        if missing:
            raise UserError(
                f"{prefix} is no {kind} data: {key_prefix(prefix, missing[0])}.idx and .bin do not both exist; "
                + describe(self.prefix)
            )
        masks = [key.replace("input_ids", _MASK) for key in needed if key.endswith("input_ids")]
        keys = [*needed, *(key for key in masks if indexed_exists(key_prefix(prefix, key))), *additional_keys]
        self.readers: Mapping[str, IndexedReader] = {
            key: IndexedReader(key_prefix(prefix, key)) for key in dict.fromkeys(keys)
        }
        self._check_lengths(additional_keys)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {key: reader[index].astype(np.int64) for key, reader in self.readers.items()}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int32; of a pair, the longer side's."""
        sides = [reader.lengths for key, reader in self.readers.items() if key.endswith("input_ids")]
        return np.maximum(*sides) if len(sides) == 2 else sides[0]

    @property
    def _ids(self) -> IndexedReader:
        return next(iter(self.readers.values()))

    def _check_lengths(self, additional_keys: Sequence[str]) -> None:
        """Keys have equally many samples, and those of one text are equally long."""
        counts = {key: len(reader) for key, reader in self.readers.items()}
        if len(set(counts.values())) > 1:
            numbers = ", ".join(f"{key} {count}" for key, count in counts.items())
            raise UserError(f"{self.prefix}: the numbers of samples differ: {numbers}; preprocess the data again")
        for key, reader in self.readers.items():
            ids = key.replace(_MASK, "input_ids").replace("labels", "input_ids")
            if key in additional_keys or np.array_equal(reader.lengths, self.readers[ids].lengths):
                continue
            at = int((reader.lengths != self.readers[ids].lengths).argmax())
            raise UserError(
                f"{self.prefix}: sample {at} has {self.readers[ids].lengths[at]} {ids}, but {reader.lengths[at]} "
                f"{key}; preprocess the data again"
            )

    def check(self, vocab_size: int | None = None) -> None:
        """Look at every number. Raises UserError naming the first that is no token id, label or mask, or where the
        labels of the set have no target at all."""
        for key, reader in self.readers.items():
            reader.check()
            is_label = key.endswith("labels") and self.kind != "prompt"
            targets = 0
            for start in range(0, len(reader.ids), _BLOCK):
                numbers = reader.ids[start : start + _BLOCK]
                wrong = numbers < 0
                if is_label:
                    wrong &= numbers != IGNORE_INDEX
                    targets += int(np.count_nonzero(numbers != IGNORE_INDEX))
                if vocab_size is not None and not key.endswith(_MASK):
                    wrong |= numbers >= vocab_size
                if wrong.any():
                    self._raise_wrong(key, start + int(wrong.argmax()), vocab_size)
            if is_label and not targets and len(self):
                raise UserError(f"{self.prefix}: no token of {key} is a target, so there is nothing to learn")

    def _raise_wrong(self, key: str, place: int, vocab_size: int | None) -> None:
        reader = self.readers[key]
        sample = int(np.searchsorted(np.cumsum(reader.lengths, dtype=np.int64), place, side="right"))
        limit = "" if vocab_size is None or key.endswith(_MASK) else f" and below the vocabulary's size {vocab_size}"
        raise UserError(
            f"{self.prefix}: {key} of sample {sample} holds {reader.ids[place]}; expected numbers from 0 on{limit}"
            + (f", or {IGNORE_INDEX}" if key.endswith("labels") else "")
            + "; was the data made with another tokenizer?"
        )


def segment_lengths(attention_mask: np.ndarray) -> np.ndarray:
    """Lengths of the parts of a sample that do not see each other, in order; padding at the end is none of them.

    A mask of ones is one segment; neat packing numbers them 1, 2, ... and writes 0 for padding. Raises UserError for
    other masks.
    """
    edges = np.concatenate([[0], np.flatnonzero(np.diff(attention_mask)) + 1, [len(attention_mask)]])
    numbers = attention_mask[edges[:-1]] if len(attention_mask) else attention_mask
    lengths = np.diff(edges)
    if len(numbers) and numbers[-1] == 0:
        numbers, lengths = numbers[:-1], lengths[:-1]
    if not np.array_equal(numbers, np.arange(1, len(numbers) + 1)):
        raise UserError(
            "an attention_mask is neither of ones nor of segments numbered 1, 2, ... with 0 for padding behind them; "
            "preprocess the data again"
        )
    return lengths[: len(numbers)]
