"""Training, validation and test data of pretraining, in the order of megatron-core's GPTDataset and BlendedDataset."""

from __future__ import annotations

import functools
import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mindspeed_llm.tasks.inference.prompts import Text
from mindspeed_llm.tasks.preprocess.blending import Chain, Rows
from mindspeed_llm.tasks.preprocess.index_cache import IndexCache
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.prepared import build_once
from mindspeed_llm.tasks.preprocess.pretrain_blend import PretrainLayout, pretrain_samples
from mindspeed_llm.tasks.preprocess.pretrain_samples import PretrainSamples, SampleIndex
from mindspeed_llm.tasks.preprocess.splits import split_documents
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer
from mindspeed_llm.training.data.batches import Batch, make_batch
from mindspeed_llm.training.data.mock import MOCK_SPLIT, MockReader
from mindspeed_llm.training.data.raw_text import RawText
from mindspeed_llm.training.data.sources import (
    NAMES,
    SPLITS,
    Blend,
    Part,
    Split,
    checked_parts,
    named_blends,
    named_text,
)
from mindspeed_llm.training.data.tokens import TokenRules, named_tokenizer, token_rules

_LOG = logging.getLogger("mindspeed_llm")


class Samples(Protocol):
    """Samples in the order of training, and how some of them become a micro batch."""

    @property
    def name(self) -> str:
        """What messages call them."""
        ...

    @property
    def rows(self) -> Rows:
        """The samples."""
        ...

    def batch(self, rows: Sequence[Any], *, source: str) -> Batch:
        """The tensors of rows. Raises UserError naming `source` where they hold what is no token."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Samples in order: `rows[i]` holds S + 1 token ids, int64."""

    name: str
    rows: Rows
    rules: TokenRules

    def batch(self, rows: Sequence[Any], *, source: str) -> Batch:
        """See `Samples`."""
        return make_batch(rows, self.rules, source=source)


@dataclass(frozen=True)
class Datasets:
    """The data of a run. `valid` and `test` are None where nothing is to be evaluated.

    `layouts` are the numbers of training samples that were laid out, for checkpoints: see `Progress`. `valid_texts` are
    the documents of the validation data, each once and in the order of the files; `stop_words` may end replies in them,
    beside the tokenizer's end of text.
    """

    train: Samples
    valid: Samples | None
    test: Samples | None
    layouts: tuple[int, ...]
    valid_texts: Iterable[Text] = ()
    stop_words: tuple[str, ...] = ()
    epoch: int | None = None
    """Training samples that there are, each of which comes once in an epoch; None where all that were laid out do."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is that goes on from a checkpoint.

    The order of samples depends on how many are laid out together. With the `layouts` of the checkpoint the samples are
    those of the run that wrote it, also where --train-iters or --global-batch-size have changed since; what is needed
    beyond them is laid out behind them, with a seed of its own.
    """

    iteration: int
    consumed_samples: int
    layouts: tuple[int, ...] = ()


def build_datasets(
    args: Namespace, tokenizer: Tokenizer | None = None, *, progress: Progress | None = None
) -> Datasets:
    """The data that the flags name, with as many samples as the run takes.

    Every process of the job must call this, and all get the same: one process (of each node with --no-shared-storage)
    tokenizes raw files and lays samples out, the others wait and map its files.

    Args:
        args: validated arguments.
        tokenizer: None loads the one that the flags name.
        progress: None for a run that starts with the first sample.

    Raises:
        UserError: see `sources.check_data`; also where no folder can be written.
    """
    blends = named_blends(args, named_text)
    tokenizer = tokenizer or named_tokenizer(args)
    rules = token_rules(args, tokenizer)
    numbers = num_samples(args)
    layouts = layouts_of(numbers["train"], args, progress)
    if blends:
        rows, texts = _rows(blends, args, tokenizer, rules, layouts)
    else:
        rows, texts = _mock_rows(args, tokenizer, rules, layouts)
    for split, found in rows.items():
        _LOG.info("%s data: %d samples of %d tokens", NAMES[split], len(found), args.seq_length)
    made = {split: Dataset(NAMES[split], found, rules) for split, found in rows.items()}
    return Datasets(made["train"], made.get("valid"), made.get("test"), layouts, valid_texts=texts)


def num_samples(args: Namespace) -> dict[Split, int]:
    """Samples of the whole run, as Megatron counts them: there is a validation every --eval-interval steps and one at
    the end."""
    batch = args.global_batch_size
    steps = args.train_samples // batch if args.train_samples else args.train_iters
    return {
        "train": args.train_samples or steps * batch,
        "valid": (steps // args.eval_interval + 1) * args.eval_iters * batch,
        "test": args.eval_iters * batch,
    }


def layouts_of(num_samples: int, args: Namespace, progress: Progress | None) -> tuple[int, ...]:
    """Numbers of training samples to lay out one behind the other, see `Progress`."""
    if progress is None:
        return (num_samples,)
    layouts, wanted = progress.layouts or (num_samples,), num_samples
    if not args.train_samples:
        steps = max(args.train_iters - progress.iteration, 0)
        wanted = progress.consumed_samples + steps * args.global_batch_size
    return layouts if wanted <= sum(layouts) else (*layouts, wanted - sum(layouts))


def index_cache(args: Namespace) -> IndexCache:
    """Where orders of samples are kept."""
    return IndexCache(
        Path(args.data_cache_path) if args.data_cache_path else None,
        fallback=Path(args.save) / "dataset_cache" if args.save else None,
        build_once=functools.partial(
            build_once, one_per_node=args.no_shared_storage, storage_flag="--no-shared-storage"
        ),
    )


def _rows(
    blends: Sequence[Blend[RawText]],
    args: Namespace,
    tokenizer: Tokenizer | None,
    rules: TokenRules,
    layouts: tuple[int, ...],
) -> tuple[dict[Split, Rows], Iterable[Text]]:
    """The rows of each split from the files that the flags name, and the documents of the validation data."""
    cache = index_cache(args)
    # What takes long comes last: first all names, then files that exist, then texts to tokenize.
    blends = sorted(blends, key=lambda blend: len(blend.texts))
    for text in (text for blend in blends for text in blend.texts):
        text.check(args, tokenizer)
    parts: list[Part] = []
    for blend in blends:
        prefixes = [name.tokenized(args, tokenizer) if isinstance(name, RawText) else name for name in blend.names]
        parts += checked_parts(blend, prefixes, args, rules, tokenizer)
    numbers = num_samples(args)
    rows: dict[Split, Rows] = {}
    texts: Iterable[Text] = ()
    for part in parts:
        if part.split == "valid":
            weights = part.weights or (1.0,) * len(part.sources)
            used = [source for source, weight in zip(part.sources, weights, strict=True) if weight]
            texts = _texts([(source.reader, source.documents) for source in used], args.seq_length)
        sizes = layouts if part.split == "train" else (numbers[part.split],)
        rows[part.split] = joined([_laid_out(part, size, args, seed, cache) for seed, size in enumerate(sizes)])
    return rows, texts


def _texts(sources: Iterable[tuple[IndexedReader | MockReader, Iterable[int]]], length: int) -> Iterator[Text]:
    """Documents as their own targets, cut to `length` tokens."""
    for reader, documents in sources:
        for number in documents:
            ids = reader.get(number, 0, min(int(reader.lengths[number]), length))
            yield ids, ids


def _laid_out(part: Part, num_samples: int, args: Namespace, seed: int, cache: IndexCache) -> Rows:
    layout = PretrainLayout(sequence_length=args.seq_length, seed=args.seed + seed)
    return pretrain_samples(part.sources, part.weights, num_samples, layout, cache)


def _mock_rows(
    args: Namespace, tokenizer: Tokenizer | None, rules: TokenRules, layouts: tuple[int, ...]
) -> tuple[dict[Split, Rows], Iterable[Text]]:
    """As `_rows`, of data that are made up. The index is made by every process: it is small, and there is no file
    beside which it could lie."""
    eod_id = rules.vocab_size - 1 if rules.eod_id is None else rules.eod_id
    reader = MockReader(rules.vocab_size if tokenizer is None else len(tokenizer), eod_id)
    numbers = num_samples(args)
    rows: dict[Split, Rows] = {}
    texts: Iterable[Text] = ()
    for split, documents in zip(SPLITS, split_documents(len(reader), MOCK_SPLIT), strict=True):
        if split == "train" or args.eval_iters:
            sizes = layouts if split == "train" else (numbers[split],)
            indices = [
                SampleIndex.build(reader.lengths, documents, size, args.seq_length, args.seed + seed)
                for seed, size in enumerate(sizes)
            ]
            rows[split] = joined([PretrainSamples(reader, index) for index in indices])
        if split == "valid":
            texts = _texts([(reader, documents)], args.seq_length)
    return rows, texts


def joined(parts: Sequence[Rows]) -> Rows:
    """The parts one behind the other."""
    return parts[0] if len(parts) == 1 else Chain(parts)
