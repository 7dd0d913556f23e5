"""What a data set gives out for one row, and the tensors of a micro batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX


class Sample(NamedTuple):
    """One row: `ids` and `labels` of equal length, labels already shifted (labels[t] is the target of position t).

    `segments` holds the lengths of parts that must not see each other, in order; None where all of the row is one text.
    """

    ids: np.ndarray
    labels: np.ndarray
    segments: Sequence[int] | None = None

    def text(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels of the first text of the row, labels not shifted."""
        size = len(self.ids) if self.segments is None else self.segments[0]
        ids, labels = self.ids[:size], np.append(np.int64(IGNORE_INDEX), self.labels[:size])
        # Rows that are cut from longer texts have the token behind them as a target.
        return (ids, labels[:-1]) if labels[-1] == IGNORE_INDEX else (np.append(ids, labels[-1]), labels)


def shifted(labels: np.ndarray) -> np.ndarray:
    """Labels moved one place to the front; the last position has no target."""
    return np.append(labels[1:], np.int64(IGNORE_INDEX))


@dataclass(frozen=True)
class Collator:
    """Stack rows to one micro batch, padded on the right.

    Rows are padded to a multiple of `pad_to_multiple` tokens, or all to `fixed_length`. A row that is None fills up the
    last global batch: it has no target and does not count. With `isolate_segments` the batch has position ids that
    start again at each segment, padding being one more segment, and no attention mask.
    """

    pad_token_id: int
    pad_to_multiple: int = 8
    fixed_length: int | None = None
    isolate_segments: bool = False

    def __call__(self, rows: Sequence[Sample | None]) -> dict[str, Any]:
        longest = max((len(row.ids) for row in rows if row is not None), default=1)
        length = self.fixed_length or -(-longest // self.pad_to_multiple) * self.pad_to_multiple
        shape = (len(rows), length)
        ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        num_tokens = 0
        for i, row in enumerate(rows):
            if row is None:
                # One visible token: attention over a row that sees nothing at all is not a number.
                mask[i, 0] = 1
                positions[i] = np.arange(length)
                continue
            size = len(row.ids)
            num_tokens += size
            ids[i, :size], labels[i, :size], mask[i, :size] = row.ids, row.labels, 1
            if self.isolate_segments:
                positions[i] = _restarting([*(row.segments or [size]), length - size])
        return {
            "input_ids": torch.from_numpy(ids),
            "labels": torch.from_numpy(labels),
            "attention_mask": None if self.isolate_segments or mask.all() else torch.from_numpy(mask),
            "position_ids": torch.from_numpy(positions) if self.isolate_segments else None,
            "num_samples": sum(row is not None for row in rows),
            "num_tokens": num_tokens,
        }


def _restarting(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([np.arange(length) for length in lengths])
