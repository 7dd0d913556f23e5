"""The tensors of a micro batch, from rows of token ids.

With --reset-attention-mask, --reset-position-ids and --eod-mask-loss, E being the end-of-document token:

    row            a  b  E  c  d  E  e
    tokens         a  b  E  c  d  E
    labels         b  E  c  d  E  e
    loss_mask      1  1  0  1  1  0         an end of document has nothing to predict
    position_ids   0  1  2  0  1  2
    documents      0  0  0  1  1  1         tokens see those of their own document only
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.data.tokens import TokenRules

Batch = dict[str, torch.Tensor]
"""`tokens`, `labels` and `position_ids` int64 [B, S], `loss_mask` fp32 [B, S]; with isolated documents also `documents`
int64 [B, S], the number of the document that each token belongs to, counted in its row."""


def make_batch(rows: Sequence[np.ndarray], rules: TokenRules, *, source: str) -> Batch:
    """Rows of S + 1 token ids -> a batch of S inputs and S targets each, in host memory.

    The rules are those of megatron-core's GPTDataset, but that padding remains what it is in `tokens` and `labels`: it
    has rows in the embedding. Raises UserError naming `source` where an id is none of the vocabulary.
    """
    ids = np.stack(rows)
    check_range(ids, rules.vocab_size, source=source)
    tokens, labels = ids[:, :-1], ids[:, 1:]
    is_end = np.zeros(tokens.shape, dtype=bool) if rules.eod_id is None else tokens == rules.eod_id
    mask = np.ones(tokens.shape, dtype=np.float32)
    if rules.masks_eod:
        mask[is_end] = 0
    if rules.pad_id is not None:
        mask[labels == rules.pad_id] = 0
    batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": mask,
        "position_ids": _positions(is_end) if rules.restarts_positions else _counted(tokens.shape),
    }
    if rules.isolates_documents:
        batch["documents"] = np.cumsum(is_end, axis=1) - is_end
    return {name: torch.from_numpy(np.array(array, order="C")) for name, array in batch.items()}


def _counted(shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[1], dtype=np.int64), shape)


def _positions(is_end: np.ndarray) -> np.ndarray:
    """Places counted from the last one behind an end."""
    places = _counted(is_end.shape)
    begins = np.zeros_like(places)
    begins[:, 1:] = np.where(is_end[:, :-1], places[:, 1:], 0)
    return places - np.maximum.accumulate(begins, axis=1)


def check_range(ids: np.ndarray, vocab_size: int, *, source: str) -> None:
    """Raise UserError naming `source` where an id is none of the vocabulary."""
    # On a device such an id gives an error without a place, or no error at all.
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        raise UserError(
            f"{source} holds token {ids[wrong][0]}, but the model's vocabulary has {vocab_size} (--vocab-size, "
            "--padded-vocab-size); was it made with another tokenizer? Preprocess it with the model's"
        )
