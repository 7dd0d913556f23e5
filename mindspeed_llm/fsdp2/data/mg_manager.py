"""Manager `mg` (stage pt): text -> one indexed file of documents -> fixed-length samples in Megatron's order."""

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.data.cache import build_once, cache_key, files_identity, stored
from mindspeed_llm.fsdp2.data.mg_samples import NextTokenSamples
from mindspeed_llm.fsdp2.data.naming import naming
from mindspeed_llm.fsdp2.data.order import BatchSplit, DataPosition, IndexOrder
from mindspeed_llm.fsdp2.data.sample import Collator
from mindspeed_llm.fsdp2.data.sources import EvalSource, LoaderOptions, MapTrainSource
from mindspeed_llm.tasks.preprocess.blending import Chain, Rows
from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry
from mindspeed_llm.tasks.preprocess.engine import tokenize_files
from mindspeed_llm.tasks.preprocess.index_cache import IndexCache
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.pretrain_blend import PretrainLayout, PretrainSource, pretrain_samples
from mindspeed_llm.tasks.preprocess.pretrain_inputs import PretrainInputs, resolve_inputs
from mindspeed_llm.tasks.preprocess.pretrain_samples import SequentialSamples, samples_per_epoch
from mindspeed_llm.tasks.preprocess.sample_store import key_prefix
from mindspeed_llm.tasks.preprocess.splits import split_documents
from mindspeed_llm.tasks.preprocess.text_work import TextColumn, TextWork
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer

_LOG = logging.getLogger("mindspeed_llm")


class MegatronDataManager:
    """Builds the sources of manager `mg`."""

    def __init__(self, config: Config, tokenizer: Any, cache_dir: Path) -> None:
        self._config, self._tokenizer, self._cache_dir = config, tokenizer, cache_dir
        self._length = config.data.cutoff_len
        self._collator = Collator(
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
            fixed_length=self._length,
            isolate_segments=config.data.reset_attention_mask,
        )
        self._eod_id = None
        if config.data.reset_attention_mask:
            if tokenizer.eos_token_id is None:
                raise UserError("data.reset_attention_mask is true, but the tokenizer has no eos token")
            self._eod_id = tokenizer.eos_token_id

    def build(
        self, split: BatchSplit, loader: LoaderOptions, start: DataPosition | None = None
    ) -> tuple[MapTrainSource, EvalSource | None]:
        """Build the training source, and the evaluation source if there is evaluation data."""
        data, training = self._config.data, self._config.training
        with naming("data.dataset"):
            readers, weights = self._readers(resolve_inputs(data.dataset, data.dataset_dir), purpose="train")
        parts = [split_documents(self._num_documents(reader), data.split) for reader in readers]
        self._check_split(parts)
        start = start or DataPosition()
        sources = [PretrainSource(reader, part[0]) for reader, part in zip(readers, parts, strict=True)]
        train, per_epoch, layouts = self._train_rows(sources, weights, split.global_batch_size, start)
        source = MapTrainSource(
            NextTokenSamples(train, eod_id=self._eod_id),
            IndexOrder(per_epoch),
            split,
            self._collator,
            num_train_epochs=training.num_train_epochs,
            max_steps=training.max_steps,
            drop_last=training.dataloader_drop_last,
            loader=loader,
            start=start,
            layouts=layouts,
        )
        if data.eval_dataset is not None:
            with naming("data.eval_dataset"):
                inputs = resolve_inputs(data.eval_dataset, data.dataset_dir, field="data.eval_dataset")
                readers, _ = self._readers(inputs, purpose="evaluate")
            documents = [range(self._num_documents(reader)) for reader in readers]
        else:
            documents = [part[1] for part in parts]
        return source, self._eval_source(readers, documents, split)

    def _check_split(self, parts: Sequence[Sequence[range]]) -> None:
        """Raise UserError when a part of `data.split` that is wanted gets no document."""
        data = self._config.data
        shares = data.split_weights
        train, evaluation, _ = (sum(len(part[number]) for part in parts) for number in range(3))
        for name, share, count in (("training", shares[0], train), ("evaluation", shares[1], evaluation)):
            if share and not count and not (name == "evaluation" and data.eval_dataset is not None):
                total = sum(len(documents) for part in parts for documents in part)
                raise UserError(
                    f"data.split {data.split!r} leaves no document for {name}: {share:g} / {sum(shares):g} of {total} "
                    f"documents is {total * share / sum(shares):.2g}, as a whole number 0; raise its share, or use "
                    "text of more documents"
                )

    def _num_documents(self, reader: IndexedReader) -> int:
        limit = self._config.data.max_samples
        return len(reader) if limit is None else min(len(reader), limit)

    def _eval_source(
        self, readers: Sequence[IndexedReader], documents: Sequence[range], split: BatchSplit
    ) -> EvalSource | None:
        if not any(len(part) for part in documents):
            return None
        rows = [SequentialSamples(reader, part, self._length) for reader, part in zip(readers, documents, strict=True)]
        if not sum(map(len, rows)):
            raise UserError("the evaluation documents hold fewer than two tokens; use a larger part or more text")
        training = self._config.training
        return EvalSource(
            NextTokenSamples(Chain(rows), eod_id=self._eod_id),
            self._collator,
            rank=split.rank,
            num_ranks=split.num_ranks,
            micro_batch_size=training.per_device_eval_batch_size or training.per_device_train_batch_size,
            max_samples=self._config.data.eval_max_samples,
        )

    def _readers(self, inputs: PretrainInputs, *, purpose: str) -> tuple[list[IndexedReader], list[float] | None]:
        readers = [IndexedReader(prefix) for prefix in inputs.prefixes]
        if inputs.texts:
            readers.append(self._tokenized(inputs.texts, purpose))
        return readers, inputs.weights

    def _tokenized(self, entries: Sequence[DatasetEntry], purpose: str) -> IndexedReader:
        data = self._config.data
        key = cache_key(
            files=[[files_identity(entry.files), entry.columns["text"]] for entry in entries],
            append_eod=data.append_eod,
            max_samples=data.max_samples,
            tokenizer=as_tokenizer(self._tokenizer).identity(),
        )
        prefix = self._cache_dir / f"{entries[0].files[0].stem}_{key}"

        def chunks(summary: Summary) -> Iterator[Chunk]:
            for entry in entries:
                work = TextWork(
                    self._tokenizer, text_of=TextColumn(entry.columns["text"] or "text"), append_eod=data.append_eod
                )
                yield from tokenize_files(
                    entry.files,
                    work,
                    summary,
                    num_workers=data.preprocessing_num_workers,
                    max_records=data.max_samples,
                    name=entry.name,
                )

        stored(
            prefix,
            ("text",),
            chunks,
            one_per_node=data.no_shared_storage,
            overwrite=data.overwrite_cache,
            purpose=purpose,
        )
        return IndexedReader(key_prefix(prefix, "text"))

    def _train_rows(
        self,
        sources: Sequence[PretrainSource],
        weights: list[float] | None,
        global_batch_size: int,
        start: DataPosition,
    ) -> tuple[Rows, int, tuple[int, ...]]:
        """The training rows in order, the number of rows of one epoch, and the lengths of the layouts they come from.

        The order of a layout depends on its length. A resumed run therefore takes the lengths that it was begun with;
        what it needs beyond them comes from a further layout behind them, with a seed of its own.
        """
        training = self._config.training
        used = [source for number, source in enumerate(sources) if weights is None or weights[number]]
        tokens = [source.num_tokens() for source in used]
        sizes = [samples_per_epoch(count, self._length) for count in tokens]
        per_epoch = sum(sizes)
        if training.max_steps > 0:
            wanted = start.samples + (training.max_steps - start.step) * global_batch_size
        else:
            wanted = math.floor(per_epoch * training.num_train_epochs + 1e-6)
        if not per_epoch:
            raise UserError(
                f"data.dataset: the training text has {sum(tokens)} tokens, which is 0 samples of data.cutoff_len "
                f"{self._length}: a sample takes cutoff_len + 1 = {self._length + 1} tokens and would hold the text "
                "several times; use more text or a smaller cutoff_len"
            )
        if wanted < 1:
            raise UserError(
                f"training.num_train_epochs {training.num_train_epochs:g} of the {per_epoch} samples of an epoch "
                f"({sum(tokens)} tokens, data.cutoff_len {self._length}) are no sample; use more epochs, more text "
                "or a smaller cutoff_len"
            )
        for source, count, size in zip(used, tokens, sizes, strict=True):
            if not size and weights is not None:
                raise UserError(
                    f"data.dataset: {source.reader.prefix} has {count} tokens to train on, but a sample of "
                    f"data.cutoff_len {self._length} takes {self._length + 1} and would hold them several times; leave "
                    "it out, use more text or a smaller cutoff_len"
                )
        _LOG.info("pretraining data: %d tokens, %d samples of %d per epoch", sum(tokens), per_epoch, self._length)
        layouts = start.layouts
        if wanted > sum(layouts):
            layouts = (*layouts, wanted - sum(layouts))
        cache = IndexCache(
            fallback=self._cache_dir,
            build_once=functools.partial(
                build_once,
                one_per_node=self._config.data.no_shared_storage,
                overwrite=self._config.data.overwrite_cache,
            ),
        )
        rows = [
            pretrain_samples(
                sources, weights, size, PretrainLayout(sequence_length=self._length, seed=training.seed + number), cache
            )
            for number, size in enumerate(layouts)
        ]
        return rows[0] if len(rows) == 1 else Chain(rows), per_epoch, layouts
