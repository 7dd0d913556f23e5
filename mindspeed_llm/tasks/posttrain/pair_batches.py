"""The tensors of a micro batch of preference pairs: P pairs are 2 P rows of one length.

row 0 .. P-1        chosen sides
row P .. 2P-1       rejected sides, in the same order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_llm.tasks.posttrain.instruction_batches import RowRules, instruction_batch
from mindspeed_llm.tasks.preprocess.blending import Rows
from mindspeed_llm.training.data.batches import Batch

SIDES = ("chosen", "rejected")
Pair = Mapping[str, np.ndarray]
"""`chosen_input_ids`, `chosen_labels`, `rejected_input_ids`, `rejected_labels`; labels as in instruction data."""


@dataclass(frozen=True)
class PairSamples:
    """Pairs in the order of training, see `training.data.datasets.Samples`."""

    name: str
    rows: Rows
    rules: RowRules

    def batch(self, rows: Sequence[Pair], *, source: str) -> Batch:
        """See `pair_batch`."""
        return pair_batch(rows, self.rules, source=source)


def pair_batch(pairs: Sequence[Pair], rules: RowRules, *, source: str) -> Batch:
    """P pairs -> a batch of 2 P rows as `instruction_batch` makes them.

    Raises UserError naming `source` where an id is none of the vocabulary.
    """
    rows = [
        {"input_ids": pair[f"{side}_input_ids"], "labels": pair[f"{side}_labels"]} for side in SIDES for pair in pairs
    ]
    return instruction_batch(rows, rules, source=source)
