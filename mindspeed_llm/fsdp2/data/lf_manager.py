"""Manager `lf`: records -> stored samples, mixed, held out, packed."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.data.cache import build_once, cache_key, files_identity, stored
from mindspeed_llm.fsdp2.data.entries import record_entries
from mindspeed_llm.fsdp2.data.lf_samples import PackedSamples, StoredSamples
from mindspeed_llm.fsdp2.data.naming import naming
from mindspeed_llm.fsdp2.data.order import BatchSplit, DataPosition, EpochOrder
from mindspeed_llm.fsdp2.data.pairs import PairCollator, PairStore, StoredPairs
from mindspeed_llm.fsdp2.data.renderers import chosen_template, make_renderer
from mindspeed_llm.fsdp2.data.sample import Collator
from mindspeed_llm.fsdp2.data.sources import EvalSource, LoaderOptions, MapTrainSource, SampleSet, TrainSource
from mindspeed_llm.fsdp2.data.stream import RecordStream, StreamTrainSource
from mindspeed_llm.fsdp2.data.tokenized_path import load_tokenized, save_tokenized, tokenized_exists
from mindspeed_llm.tasks.preprocess.chunks import Work
from mindspeed_llm.tasks.preprocess.conversation_work import ConversationWork
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry
from mindspeed_llm.tasks.preprocess.engine import tokenize_files
from mindspeed_llm.tasks.preprocess.mixing import mix, resample
from mindspeed_llm.tasks.preprocess.packing import plan_packs
from mindspeed_llm.tasks.preprocess.pairwise_work import PairwiseWork
from mindspeed_llm.tasks.preprocess.sample_store import SampleStore
from mindspeed_llm.tasks.preprocess.samples import SampleOptions
from mindspeed_llm.tasks.preprocess.text_work import TextColumn, TextWork
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer

_LOG = logging.getLogger("mindspeed_llm")

EvalSets = Mapping[str, StoredSamples]
"""Name of an evaluation set -> its samples; the name is "" where all are one."""


class LFDataManager:
    """Builds the sources of manager `lf`."""

    def __init__(self, config: Config, tokenizer: Any, cache_dir: Path) -> None:
        self._config, self._tokenizer, self._cache_dir = config, tokenizer, cache_dir
        self._data, self._training = config.data, config.training
        self._tokenizer_identity = as_tokenizer(tokenizer).identity()
        is_chat = self._training.stage != "pt"
        self._is_pairs = self._training.stage == "dpo"
        self._template = chosen_template(self._data, tokenizer) if is_chat else None
        self._renderer = make_renderer(self._data, tokenizer) if is_chat else None
        self._packs = self._data.packing or self._data.neat_packing

    def build(
        self, split: BatchSplit, loader: LoaderOptions, start: DataPosition | None = None
    ) -> tuple[TrainSource, EvalSource | dict[str, EvalSource] | None]:
        """Build the training source, and the evaluation source or sources if there is evaluation data."""
        if self._data.streaming:
            return self._build_stream(split, loader, start)
        train, held_out = self._sample_sets()
        rows = self._packed(train) if self._packs else train
        source = MapTrainSource(
            rows,
            EpochOrder(len(rows), seed=self._training.seed, shuffle=not self._training.disable_shuffling),
            split,
            self._collator(packed=self._packs),
            num_train_epochs=self._training.num_train_epochs,
            max_steps=self._training.max_steps,
            drop_last=self._training.dataloader_drop_last,
            loader=loader,
            start=start,
        )
        return source, self._eval_sources(held_out, split)

    def _sample_sets(self) -> tuple[StoredSamples, EvalSets]:
        """Training samples and evaluation sets, from `tokenized_path` where it has content, else from records."""
        path = Path(self._data.tokenized_path) if self._data.tokenized_path else None
        if path is not None and tokenized_exists(path):
            train, held_out = load_tokenized(path, self.settings())
            if self._data.eval_dataset is not None and not held_out:
                raise UserError(
                    f"data.tokenized_path {path} holds no evaluation data, but data.eval_dataset is set; name another "
                    "folder to make both anew, or leave eval_dataset out"
                )
            _LOG.info("reading tokenized data from %s; data.dataset is not looked at", path)
            return train, held_out
        if self._data.dataset is None:
            raise UserError(f"data.dataset is not set, and data.tokenized_path {path} holds no data yet")
        with naming("data.dataset"):
            entries = record_entries(self._config, self._data.dataset, "data.dataset")
            train, held_out = self._hold_out(self._mixed(entries), [entry.name for entry in entries])
        if self._data.eval_dataset is not None:
            held_out = self._evaluation_sets()
        if path is not None:
            build_once(
                lambda: tokenized_exists(path),
                lambda: save_tokenized(path, train, held_out, self.settings()),
                one_per_node=not self._data.data_shared_file_system,
            )
        return train, held_out

    def settings(self) -> dict[str, Any]:
        """What decides the tokenized samples beside the records: name -> value, plain enough for JSON."""
        data = self._data
        names = ["cutoff_len", "max_samples", "val_size", "mix_strategy", "interleave_probs", "eval_on_each_dataset"]
        settings: dict[str, Any] = {"training.stage": self._training.stage}
        if self._renderer is None:
            names.append("append_eod")
        else:
            names += ["train_on_prompt", "mask_history", "enable_thinking", "tool_format", "default_system"]
            own = self._template is None
            settings["data.template"] = "the tokenizer's own" if own else self._template.name
            settings["content of the template"] = cache_key(template=None if own else asdict(self._template))
        settings |= {f"data.{name}": getattr(data, name) for name in names}
        if data.val_size or data.interleave_probs:
            settings["training.seed"] = self._seed
        return settings | {"tokenizer": self._tokenizer_identity}

    def _evaluation_sets(self) -> EvalSets:
        """The samples of `eval_dataset`."""
        with naming("data.eval_dataset"):
            entries = record_entries(self._config, self._data.eval_dataset, "data.eval_dataset")
            stores = [self._store(entry, purpose="evaluate") for entry in entries]
            return self._by_set(
                self._samples(stores, *mix([len(store) for store in stores])), [entry.name for entry in entries]
            )

    def _store(self, entry: DatasetEntry, *, purpose: str) -> SampleStore | PairStore:
        """The tokenized samples of one data set, from the cache or made now."""
        data = self._data
        key = cache_key(
            files=files_identity(entry.files),
            formatting=entry.formatting,
            columns=entry.columns,
            tags=entry.tags,
            stage=self._training.stage,
            template=asdict(self._template) if self._template is not None else None,
            default_system=data.default_system,
            enable_thinking=data.enable_thinking,
            cutoff_len=data.cutoff_len,
            train_on_prompt=data.train_on_prompt,
            mask_history=data.mask_history,
            append_eod=data.append_eod,
            max_samples=data.max_samples,
            tokenizer=self._tokenizer_identity,
        )
        prefix = self._cache_dir / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', Path(entry.name).stem)}_{key}"

        work = self.work(entry)
        stored(
            prefix,
            work.keys,
            lambda summary: tokenize_files(
                entry.files,
                work,
                summary,
                num_workers=data.preprocessing_num_workers,
                batch_size=data.preprocessing_batch_size,
                max_records=data.max_samples,
                name=entry.name,
            ),
            one_per_node=not data.data_shared_file_system,
            overwrite=data.overwrite_cache,
            purpose=purpose,
        )
        return PairStore(prefix) if self._is_pairs else SampleStore(prefix)

    def work(self, entry: DatasetEntry) -> Work:
        """What is done with the records of a data set."""
        data = self._data
        if self._renderer is None:
            column = entry.columns["text"] or "text"
            return TextWork(
                self._tokenizer,
                text_of=TextColumn(column),
                append_eod=data.append_eod,
                piece_length=data.cutoff_len,
                drop_single_tokens=True,
            )
        if self._is_pairs:
            return PairwiseWork(self._renderer, SampleOptions(data.cutoff_len), [entry.layout])
        options = SampleOptions(data.cutoff_len, data.train_on_prompt, data.mask_history)
        return ConversationWork(self._renderer, options, [entry.layout])

    def _mixed(self, entries: Sequence[DatasetEntry]) -> StoredSamples:
        stores = [self._store(entry, purpose="train") for entry in entries]
        # A data set with num_samples counts as that many samples, drawn with repetition where it has fewer.
        places = [
            np.arange(len(store)) if entry.num_samples is None else resample(len(store), entry.num_samples, self._seed)
            for store, entry in zip(stores, entries, strict=True)
        ]
        sets, samples = mix(list(map(len, places)), self._data.mix_strategy, self._probabilities(), self._seed)
        for number, place in enumerate(places):
            mine = sets == number
            samples[mine] = place[samples[mine]]
        return self._samples(stores, sets, samples)

    def _samples(self, stores: Sequence[Any], sets: np.ndarray, samples: np.ndarray) -> StoredSamples:
        return (StoredPairs if self._is_pairs else StoredSamples)(stores, sets, samples)

    @property
    def _seed(self) -> int:
        return self._training.seed

    def _probabilities(self) -> list[float] | None:
        text = self._data.interleave_probs
        return [float(part) for part in text.split(",")] if text else None

    def _hold_out(self, mixed: StoredSamples, names: Sequence[str]) -> tuple[StoredSamples, EvalSets]:
        """Hold `val_size` samples out; a sample that mixing repeats is held out with all its repetitions."""
        size = self._data.val_size
        if not size:
            return mixed, {}
        pairs = np.stack([mixed.sets, mixed.samples], axis=1)
        unique, first, inverse = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
        count = int(size) if size >= 1 else max(1, round(len(unique) * size))
        if count >= len(unique):
            raise UserError(
                f"data.val_size {size:g} holds out {count} of {len(unique)} samples; none is left to train on"
            )
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((self._seed, 1))))
        chosen = np.zeros(len(unique), dtype=bool)
        chosen[random.permutation(len(unique))[:count]] = True
        held_out = mixed.take(np.sort(first[chosen]))
        return mixed.take(~chosen[inverse.reshape(-1)]), self._by_set(held_out, names)

    def _by_set(self, samples: StoredSamples, names: Sequence[str]) -> EvalSets:
        if not self._data.eval_on_each_dataset:
            return {"": samples}
        return {
            name: samples.take(samples.sets == number)
            for number, name in enumerate(names)
            if (samples.sets == number).any()
        }

    def _packed(self, samples: StoredSamples) -> SampleSet:
        capacity = self._data.cutoff_len
        lengths = samples.lengths
        members, offsets = plan_packs(lengths, capacity, self._data.preprocessing_batch_size)
        filled = int(lengths.sum()) / ((len(offsets) - 1) * capacity)
        _LOG.info(
            "packed %d samples into %d rows of %d, %.1f %% full", len(lengths), len(offsets) - 1, capacity, 100 * filled
        )
        return PackedSamples(samples, members, offsets, isolate=self._data.neat_packing)

    def _collator(self, *, packed: bool) -> Collator | PairCollator:
        pad = self._tokenizer.pad_token_id
        collator = Collator(
            pad_token_id=pad if pad is not None else 0,
            fixed_length=self._data.cutoff_len if packed else None,
            isolate_segments=packed and self._data.neat_packing,
        )
        return PairCollator(collator) if self._is_pairs else collator

    def _eval_sources(self, sets: EvalSets, split: BatchSplit) -> EvalSource | dict[str, EvalSource] | None:
        # Evaluation rows are never packed: the loss of a sample is that of the sample alone.
        sources = {name: self._eval_source(samples, split) for name, samples in sets.items()}
        return sources[""] if list(sources) == [""] else sources or None

    def _eval_source(self, samples: SampleSet, split: BatchSplit) -> EvalSource:
        return EvalSource(
            samples,
            self._collator(packed=False),
            rank=split.rank,
            num_ranks=split.num_ranks,
            micro_batch_size=self._training.per_device_eval_batch_size or self._training.per_device_train_batch_size,
            max_samples=self._data.eval_max_samples,
        )

    def _build_stream(
        self, split: BatchSplit, loader: LoaderOptions, start: DataPosition | None = None
    ) -> tuple[TrainSource, EvalSource | dict[str, EvalSource] | None]:
        data = self._data
        if self._packs:
            raise UserError(
                "data.streaming and data.packing exclude each other: packing looks at whole batches of samples"
            )
        with naming("data.dataset"):
            entries = record_entries(self._config, data.dataset, "data.dataset")
        source = StreamTrainSource(
            RecordStream(
                entries,
                [self.work(entry) for entry in entries],
                strategy=data.mix_strategy,
                probabilities=self._probabilities(),
                buffer_size=1 if self._training.disable_shuffling else data.buffer_size,
                seed=self._seed,
                skip=int(data.val_size),
            ),
            split,
            self._collator(packed=False),
            max_steps=self._training.max_steps,
            loader=loader,
            start=start,
        )
        held_out: EvalSets = {}
        if data.eval_dataset is not None:
            held_out = self._evaluation_sets()
        sources = self._eval_sources(held_out, split)
        if data.val_size:
            sources = self._eval_source(source.stream.held_out(), split)
        return source, sources
