"""Small indexed files, and megatron-core's data sets over them: the authority on the order of samples."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter


def corpus(prefix: Path, lengths: Sequence[int], first: int = 0, dtype: Any = np.int32) -> IndexedReader:
    """Documents of the given lengths; token values are their place in the corpus, from `first` on."""
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_many(np.arange(first, first + sum(lengths)), lengths)
    return IndexedReader(prefix)


class _Tokenizer:
    # No token has these numbers, so that nothing is taken for padding or for an end.
    vocab_size, eod, pad, unique_identifiers = 32000, 10**9, 10**9 + 1, {}


def megatron_config(**fields: Any) -> Any:
    """A GPTDatasetConfig; caches nothing but what it keeps beside the data."""
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    return gpt.GPTDatasetConfig(
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **fields,
    )


def megatron_splits(sizes: Sequence[int | None], **fields: Any) -> list[Any]:
    """Train, valid and test (None where there is none) as megatron-core's builder makes them.

    The indices that it keeps beside the data are removed first: their names say neither whether samples have an extra
    token nor what the data are, so that it would take those of another test.
    """
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    from megatron.core.datasets.gpt_dataset import GPTDataset

    for prefixes, _ in [blend for blend in [fields.get("blend"), *fields.get("blend_per_split", ())] if blend]:
        for prefix in prefixes:
            shutil.rmtree(prefix, ignore_errors=True)
    return builder.BlendedMegatronDatasetBuilder(
        GPTDataset, list(sizes), lambda: True, megatron_config(**fields)
    ).build()


def tokens_of(dataset: Any) -> list[list[int]]:
    """All samples of a data set of megatron-core, each with its extra token where it has one."""
    rows = []
    for index in range(len(dataset)):
        item = dataset[index]
        extra = item["labels"][-1:].tolist() if dataset.config.add_extra_token_to_sequence else []
        rows.append(item["tokens"].tolist() + extra)
    return rows
