"""What a sample consists of: sequences of token ids, and which of the tokens carry loss.

Labels are as in the files: labels[t] belongs to ids[t], -100 means no target.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX

NO_LOSS, LOSS, OTHER_TARGET = 0, 1, 2
"""States of a token: no target; the token itself is the target of the place before it; another id is."""

_FEW_PADDING = 2  # a single last token without loss may belong to the text


@dataclass(frozen=True)
class Stream:
    """One sequence.

    `ids` and `labels` are int64 of equal length; `segments` the number of the packed sample (or sentence) that each
    token belongs to, None where all belong together; the last `num_padding` tokens are padding. `title` tells the
    streams of a sample apart. `trained` is False for sequences that never carry loss, such as prompts.
    """

    title: str
    ids: np.ndarray
    labels: np.ndarray
    segments: np.ndarray | None = None
    num_padding: int = 0
    trained: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens without the padding."""
        return len(self.ids) - self.num_padding

    @cached_property
    def states(self) -> np.ndarray:
        """State of each token (uint8). The first token of a sequence is never predicted, whatever its label says."""
        states = np.where(self.labels == self.ids, LOSS, OTHER_TARGET).astype(np.uint8)
        states[self.labels == IGNORE_INDEX] = NO_LOSS
        states[:1] = NO_LOSS
        return states

    @property
    def num_targets(self) -> int:
        """Tokens that carry loss."""
        return int(np.count_nonzero(self.states))

    @property
    def share(self) -> float:
        """Targets among the tokens, 0..1."""
        return self.num_targets / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True)
class Sample:
    """Sample `index` of a data set. `common` counts the tokens with which all its streams start, for pairs."""

    index: int
    streams: tuple[Stream, ...]
    common: int | None = None


def loss_profile(stream: Stream, cells: int) -> np.ndarray:
    """Share of tokens with loss in each of at most `cells` equal parts of a sequence (padding included), 0..1."""
    if not len(stream.ids):
        return np.zeros(0)
    bounds = np.linspace(0, len(stream.ids), min(cells, len(stream.ids)) + 1).astype(np.int64)
    counts = np.add.reduceat((stream.states != NO_LOSS).astype(np.int64), bounds[:-1])
    return counts / np.diff(bounds)


def text_stream(title: str, parts: list[np.ndarray]) -> Stream:
    """A document for pretraining, of one or more sentences: all of it carries loss."""
    ids = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
    numbers = np.repeat(np.arange(1, len(parts) + 1), [len(part) for part in parts])
    return Stream(title, ids, ids, numbers if len(parts) > 1 else None)


def prompt_stream(title: str, ids: np.ndarray) -> Stream:
    """A sequence without loss."""
    ids = ids.astype(np.int64)
    return Stream(title, ids, np.full_like(ids, IGNORE_INDEX), trained=False)


def labelled_stream(
    title: str,
    ids: np.ndarray,
    labels: np.ndarray,
    mask: np.ndarray | None = None,
    *,
    padding_ids: frozenset[int] | None = frozenset(),
) -> Stream:
    """A sequence with labels.

    `mask` is the attention mask of the files: the number of the packed sample for each token and 0 for padding (neat
    packing), else ones or None. Without zeros in the mask, a row at the end of one of `padding_ids` (None: of any id)
    without labels is padding.
    """
    ids, labels = ids.astype(np.int64), labels.astype(np.int64)
    if mask is None or np.all(mask == 1):
        return Stream(title, ids, labels, num_padding=_padding_at_end(ids, labels, padding_ids))
    return Stream(title, ids, labels, mask.astype(np.int64), _length_at_end((mask == 0) & (labels == IGNORE_INDEX)))


def pair_sample(index: int, chosen: Stream, rejected: Stream) -> Sample:
    """Both replies to a prompt; what they have in common at the start is counted."""
    shorter = min(len(chosen.ids), len(rejected.ids))
    differences = np.flatnonzero(chosen.ids[:shorter] != rejected.ids[:shorter])
    return Sample(index, (chosen, rejected), int(differences[0]) if len(differences) else shorter)


def _padding_at_end(ids: np.ndarray, labels: np.ndarray, padding_ids: frozenset[int] | None) -> int:
    if not len(ids) or (padding_ids is not None and int(ids[-1]) not in padding_ids):
        return 0
    length = _length_at_end((ids == ids[-1]) & (labels == IGNORE_INDEX))
    return length if length >= _FEW_PADDING else 0


def _length_at_end(flags: np.ndarray) -> int:
    """Number of true flags at the end."""
    others = np.flatnonzero(~flags)
    return len(flags) - (int(others[-1]) + 1 if len(others) else 0)
