"""Micro batches by hand."""

import numpy as np

from mindspeed_llm.fsdp2.data.sample import Collator, Sample, shifted

N = -100


def _sample(ids, labels, segments=None):
    return Sample(np.array(ids), shifted(np.array(labels)), segments)


def test_shift():
    assert shifted(np.array([1, 2, 3])).tolist() == [2, 3, N]
    assert shifted(np.array([1])).tolist() == [N]


def test_padding():
    batch = Collator(pad_token_id=9, pad_to_multiple=4)([_sample([1, 2, 3], [N, 2, 3]), _sample([5], [5])])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9], [5, 9, 9, 9]]
    assert batch["labels"].tolist() == [[2, 3, N, N], [N, N, N, N]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["position_ids"] is None
    assert (batch["num_samples"], batch["num_tokens"]) == (2, 4)


def test_no_mask_where_nothing_is_padded():
    batch = Collator(pad_token_id=9, pad_to_multiple=2)([_sample([1, 2], [1, 2]), _sample([3, 4], [3, 4])])
    assert batch["attention_mask"] is None


def test_segments():
    collator = Collator(pad_token_id=9, fixed_length=8, isolate_segments=True)
    batch = collator([_sample([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [2, 3]), _sample([6, 7], [6, 7]), None])
    assert batch["attention_mask"] is None
    assert batch["position_ids"].tolist() == [
        [0, 1, 0, 1, 2, 0, 1, 2],
        [0, 1, 0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert (batch["num_samples"], batch["num_tokens"]) == (2, 7)
