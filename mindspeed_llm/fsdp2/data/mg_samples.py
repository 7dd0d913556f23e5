"""Sample sets of manager `mg`: rows of one fixed length cut from joined documents."""

import numpy as np

from mindspeed_llm.fsdp2.data.sample import Sample
from mindspeed_llm.tasks.preprocess.blending import Rows
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX


class NextTokenSamples:
    """Rows of S + 1 tokens -> S inputs and S targets.

    With `eod_id` documents do not see each other: each end-of-document token closes a segment and has no target.
    """

    def __init__(self, rows: Rows, *, eod_id: int | None = None) -> None:
        self._rows, self._eod_id = rows, eod_id

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        tokens = self._rows[index]
        ids, labels = tokens[:-1], tokens[1:]
        if self._eod_id is None:
            return Sample(ids, labels)
        ends = np.flatnonzero(ids == self._eod_id)
        labels = labels.copy()
        labels[ends] = IGNORE_INDEX
        edges = np.unique(np.concatenate([[0], ends + 1, [len(ids)]]))
        return Sample(ids, labels, np.diff(edges).tolist())
