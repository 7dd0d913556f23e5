"""Arguments as the command line gives them, and megatron-core's data sets for the same arguments."""

import contextlib
import shutil
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter
from mindspeed_llm.training.arguments.parser import parse
from tests.support.tokenizers import byte_tokenizer

VOCAB, EOD, PAD = 300, 257, 258


def arguments(*words: Any, **changes: Any) -> Namespace:
    """The flags of a small run and `words`, as far as the data need them; `changes` are set behind them."""
    line = (
        "--seq-length 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 10 --eval-interval 4 --eval-iters 2 "
        f"--seed 11 --vocab-size {VOCAB} --padded-vocab-size {VOCAB} --num-workers 0"
    )
    args = parse([*line.split(), *map(str, words)])
    for name, value in changes.items():
        assert hasattr(args, name), name
        setattr(args, name, value)
    return args


def documents(prefix: Path, lengths: Sequence[int], *, seed: int, eod: int | None = EOD) -> IndexedReader:
    """An indexed file of random bytes; each document that is not empty ends with `eod`."""
    random = np.random.RandomState(seed)
    with IndexedWriter(prefix) as writer:
        for length in lengths:
            ids = random.randint(0, 256, size=length)
            if eod is not None:
                ids[-1:] = eod
            writer.add(ids)
    return IndexedReader(prefix)


def save_tokenizer(folder: Path, **options: Any) -> Path:
    """A directory with a tokenizer of bytes: eos has id EOD, and pad, where it is asked for, PAD."""
    byte_tokenizer(**options).save_pretrained(folder)
    return folder


@dataclass
class MegatronTokenizer:
    """What megatron-core's data sets ask a tokenizer for. Without `pad` an id that no token has."""

    eod: int = EOD
    pad: int = 10**9
    vocab_size: int = VOCAB
    unique_identifiers: dict[str, Any] = field(default_factory=dict)
    special_tokens_dict: dict[str, int] = field(default_factory=lambda: {"bos_token": 256})


def megatron_datasets(
    args: Namespace,
    sizes: Sequence[int],
    *,
    tokenizer: MegatronTokenizer | None = None,
    mock: bool = False,
    attention_mask: bool = False,
) -> list[Any]:
    """Train, valid and test of megatron-core's builder for the same flags; its indices are removed afterwards."""
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from megatron.core.datasets.utils import get_blend_from_list

    each = [args.train_data_path, args.valid_data_path, args.test_data_path]
    config = gpt.GPTDatasetConfig(
        tokenizer=tokenizer or MegatronTokenizer(),
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path and list(args.data_path)),
        blend_per_split=[get_blend_from_list(items and list(items)) for items in each] if any(each) else None,
        split=args.split,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=attention_mask,
    )
    kind = gpt.MockGPTDataset if mock else gpt.GPTDataset
    try:
        return builder.BlendedMegatronDatasetBuilder(kind, list(sizes), lambda: True, config).build()
    finally:
        for item in (*(args.data_path or ()), *(item for items in each for item in items or ())):
            # Its names do not say what the data are.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                shutil.rmtree(item)
