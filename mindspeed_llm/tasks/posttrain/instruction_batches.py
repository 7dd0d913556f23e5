"""The tensors of a micro batch, from rows of token ids and labels.

Two samples in one row, `.` being padding, and 7 a sample of its own; A, B, C targets, - none:

    input_ids      a a A A b B . .     c C C
    tokens         a a A A b B . .     c C C . . . . .
    labels         - A A - B - - -     C C - - - - - -      each place has the target of its neighbour on the right
    loss_mask      0 1 1 0 1 0 0 0     1 1 0 0 0 0 0 0
    documents      0 0 0 0 1 1 2 2     0 0 0 1 1 1 1 1      with --reset-attention-mask, as are the next
    position_ids   0 1 2 3 0 1 0 1     0 1 2 0 1 2 3 4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mindspeed_llm.tasks.preprocess.blending import Rows
from mindspeed_llm.tasks.preprocess.sample_sets import segment_lengths
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX
from mindspeed_llm.training.data.batches import Batch, check_range

Row = Mapping[str, np.ndarray]
"""`input_ids` and `labels` (not shifted, -100: no target), and, where the data have it, `attention_mask`; int64 [n]."""


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """What the tensors of a batch depend on beside its rows."""

    vocab_size: int
    """Ids from 0 to below this have a meaning for the model."""
    pad_id: int
    length: int
    """Tokens of a row, at most."""
    multiple: int | None = None
    """The longest row of a batch decides its length, rounded up to a multiple of this; None: all have `length`."""
    isolates_samples: bool = False
    restarts_positions: bool = False


@dataclass(frozen=True)
class InstructionSamples:
    """Rows in the order of training, see `training.data.datasets.Samples`."""

    name: str
    rows: Rows
    rules: RowRules

    def batch(self, rows: Sequence[Row], *, source: str) -> Batch:
        """See `instruction_batch`."""
        return instruction_batch(rows, self.rules, source=source)


def instruction_batch(rows: Sequence[Row], rules: RowRules, *, source: str) -> Batch:
    """Rows -> a batch of B rows of S tokens, in host memory; its tensors are those of pretraining.

    Raises UserError naming `source` where an id is none of the vocabulary, or a mask none of samples.
    """
    length = rules.length
    if rules.multiple is not None:
        longest = max(len(row["input_ids"]) for row in rows)
        length = min(-(-longest // rules.multiple) * rules.multiple, length)
    shape = (len(rows), length)
    tokens = np.full(shape, rules.pad_id, dtype=np.int64)
    # Where there is no target the label is any token: the loss there is multiplied by 0.
    labels, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    documents = np.zeros(shape, dtype=np.int64)
    positions = np.tile(np.arange(length, dtype=np.int64), (len(rows), 1))
    for place, row in enumerate(rows):
        ids, targets = row["input_ids"], row["labels"]
        for values in (ids, targets[targets != IGNORE_INDEX]):
            check_range(values, rules.vocab_size, source=source)
        size = len(ids)
        starts = np.zeros(1, dtype=np.int64)
        if rules.isolates_samples or rules.restarts_positions:
            parts = segment_lengths(row["attention_mask"]) if "attention_mask" in row else np.array([size])
            starts = np.cumsum(parts) - parts
            # What is behind the last sample is padding, one more document.
            ends = [*starts.tolist()[1:], int(parts.sum()), length]
            for number, (start, end) in enumerate(zip([*starts.tolist(), int(parts.sum())], ends, strict=True)):
                documents[place, start:end] = number
                if rules.restarts_positions:
                    positions[place, start:end] = np.arange(end - start)
        targets = targets.copy()
        # The first token of a sample is predicted from nothing, least of all from the sample before it.
        targets[starts] = IGNORE_INDEX
        tokens[place, :size] = ids
        has_target = targets[1:] != IGNORE_INDEX
        labels[place, : size - 1] = np.where(has_target, targets[1:], 0)
        mask[place, : size - 1] = has_target
    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
    if rules.isolates_samples:
        batch["documents"] = documents
    return {name: torch.from_numpy(array) for name, array in batch.items()}
