"""Training, validation and test data of fine-tuning, in an order that depends on flags and files alone."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.prompts import Text
from mindspeed_llm.tasks.posttrain.instruction_batches import InstructionSamples, RowRules
from mindspeed_llm.tasks.posttrain.instruction_sources import (
    CutSampleSet,
    check_prepared,
    instruction_blends,
    left_out,
)
from mindspeed_llm.tasks.posttrain.pair_batches import PairSamples
from mindspeed_llm.tasks.posttrain.raw_records import RawRecords
from mindspeed_llm.tasks.preprocess.blending import Rows
from mindspeed_llm.tasks.preprocess.command.reuse import read_content
from mindspeed_llm.tasks.preprocess.handlers import Kind
from mindspeed_llm.tasks.preprocess.index_cache import IndexCache
from mindspeed_llm.tasks.preprocess.sample_order import SampleOrder, SampleSource, ordered_samples
from mindspeed_llm.tasks.preprocess.sample_sets import segment_lengths
from mindspeed_llm.tasks.preprocess.splits import split_documents
from mindspeed_llm.tasks.preprocess.templates import TEMPLATES_FILE, load_template, template_names
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer
from mindspeed_llm.training.data.datasets import Datasets, Progress, index_cache, joined, layouts_of, num_samples
from mindspeed_llm.training.data.sources import DEFAULT_SPLIT, NAMES, Blend, Split, wanted_parts
from mindspeed_llm.training.data.tokens import named_tokenizer, vocabulary_of

_LOG = logging.getLogger("mindspeed_llm")


@dataclass(frozen=True)
class _Part:
    """The samples of one of train, valid and test."""

    split: Split
    flag: str
    sources: tuple[SampleSource, ...]
    weights: tuple[float, ...] | None


def build_instructions(args: Namespace, progress: Progress | None = None, kind: Kind = "instruction") -> Datasets:
    """The data that the flags name, with as many samples as the run takes.

    Every process of the job must call this, and all get the same: one process (of each node with --no-shared-storage)
    preprocesses raw records and orders samples, the others wait and map its files.

    Args:
        args: validated arguments.
        progress: None for a run that starts with the first sample.
        kind: instruction or pairwise.

    Raises:
        UserError: see `check_instructions`; also where no folder can be written, or a part that is needed is empty.
    """
    tokenizer = named_tokenizer(args)
    rules = row_rules(args, tokenizer)
    samples_of = PairSamples if kind == "pairwise" else InstructionSamples
    parts: list[_Part] = []
    # What takes long comes last: samples that exist, then records to preprocess.
    for blend in sorted(instruction_blends(args, kind), key=lambda blend: len(blend.texts)):
        parts += _parts(blend, _sample_sets(blend, args, tokenizer, kind), args)
    cache = index_cache(args)
    numbers, layouts = num_samples(args), layouts_of(num_samples(args)["train"], args, progress)
    texts: Iterable[Text] = ()
    made: dict[Split, InstructionSamples | PairSamples] = {}
    for part in parts:
        wanted = layouts if part.split == "train" else (numbers[part.split],)
        if part.split == "valid":
            texts = _texts(part, kind)
        rows = _rows(part, wanted, args, rules, cache)
        _LOG.info("%s data: %d samples", NAMES[part.split], sum(len(source.documents) for source in part.sources))
        made[part.split] = samples_of(NAMES[part.split], rows, rules)
    return Datasets(
        made["train"],
        made.get("valid"),
        made.get("test"),
        layouts,
        valid_texts=texts,
        stop_words=_stop_words(parts, args),
        epoch=sum(len(source.documents) for part in parts if part.split == "train" for source in part.sources),
    )


def _texts(part: _Part, kind: Kind) -> Iterator[Text]:
    """The samples of a part, of packed ones the first of each row, of pairs the chosen side."""
    side = "chosen_" if kind == "pairwise" else ""
    weights = part.weights or (1.0,) * len(part.sources)
    for source in (source for source, weight in zip(part.sources, weights, strict=True) if weight):
        for number in source.documents:
            row = source.samples[number]
            ids, labels = row[f"{side}input_ids"], row[f"{side}labels"]
            size = segment_lengths(row["attention_mask"])[0] if "attention_mask" in row else len(ids)
            yield ids[:size], labels[:size]


def _stop_words(parts: Sequence[_Part], args: Namespace) -> tuple[str, ...]:
    """What ends replies in the templates that data were made with. Names of other template files say nothing here."""
    made = {read_content(source.samples.prefix).get("prompt_type") for part in parts for source in part.sources}
    file = Path(args.prompt_type_path) if args.prompt_type_path else TEMPLATES_FILE
    names = sorted(made & set(template_names(file)))
    return tuple(dict.fromkeys(word for name in names for word in load_template(name, file).stop_words))


def row_rules(args: Namespace, tokenizer: Tokenizer | None) -> RowRules:
    """The rules that the flags ask for. Raises UserError where the tokenizer has more tokens than the model."""
    padding = [] if tokenizer is None else [tokenizer.pad_token_id, tokenizer.eos_token_id]
    return RowRules(
        vocab_size=vocabulary_of(args, tokenizer),
        # Any token would do: nothing sees padding that is behind it, and nothing is learned there.
        pad_id=next((token for token in padding if token is not None), 0),
        length=args.seq_length,
        multiple=args.pad_to_multiple_of if args.variable_seq_lengths else None,
        isolates_samples=args.reset_attention_mask,
        restarts_positions=args.reset_attention_mask or args.reset_position_ids,
    )


def _sample_sets(
    blend: Blend[RawRecords], args: Namespace, tokenizer: Tokenizer | None, kind: Kind
) -> list[CutSampleSet]:
    sets = []
    for name in blend.names:
        prefix = name if isinstance(name, Path) else name.prepared(args, tokenizer)
        samples = CutSampleSet(prefix, args.seq_length, kind)
        check_prepared(blend.flag, samples, args, tokenizer)
        sets.append(samples)
    for line in left_out(sets, args.seq_length):
        _LOG.warning(line)
    return sets


def _parts(blend: Blend[Any], sets: Sequence[CutSampleSet], args: Namespace) -> list[_Part]:
    """The parts of a blend that are wanted, see `wanted_parts`; none is empty."""
    split = args.split or DEFAULT_SPLIT

    def make(name: Split, place: int | None) -> _Part | str:
        documents = [
            range(len(samples))
            if place is None
            else samples.numbers_of(split_documents(samples.num_stored, split)[place])
            for samples in sets
        ]
        empty = [samples for samples, part in zip(sets, documents, strict=True) if not len(part)]
        if not empty or (blend.weights is None and len(empty) < len(sets)):
            sources = tuple(SampleSource(samples, part) for samples, part in zip(sets, documents, strict=True))
            return _Part(name, blend.flag, sources, blend.weights)
        return (
            f"{blend.flag}: {'' if place is None else f'--split {split} leaves '}no sample of {empty[0].prefix} for "
            f"{NAMES[name]}; use more data" + ("" if name == "train" else ", or set --eval-iters 0")
        )

    return wanted_parts(blend, args, make)


def _rows(part: _Part, layouts: Sequence[int], args: Namespace, rules: RowRules, cache: IndexCache) -> Rows:
    """At least as many rows as the layouts ask for, together."""

    def ordered(count: int, seed: int) -> Rows:
        shuffle: Literal["none", "all", "epoch"] = (
            "none" if args.no_shuffle else "all" if args.full_shuffle_instruction_dataset else "epoch"
        )
        order = SampleOrder(seed=args.seed + seed, shuffle=shuffle)
        return ordered_samples(part.sources, part.weights, count, order, cache, vocab_size=rules.vocab_size)

    if args.full_shuffle_instruction_dataset:
        # The order of one layout depends on how many samples are in it; each holds whole epochs.
        return joined([ordered(count, number) for number, count in enumerate(layouts)])
    # A longer order begins as a shorter one does.
    wanted = sum(layouts)
    if not args.padded_samples or part.split != "train":
        return ordered(wanted, 0)
    if part.weights is not None:
        raise UserError(
            f"--padded-samples fills epochs up, but the data of {part.flag} have weights, and with them no epochs "
            "together; leave one of them out"
        )
    size = sum(len(source.documents) for source in part.sources)
    padded = size + -size % args.global_batch_size
    return FilledEpochs(ordered(-(-wanted // padded) * size, 0), size, padded)


class FilledEpochs:
    """Rows of epochs of `size` samples, each followed by its first ones again until it has `padded`."""

    def __init__(self, rows: Rows, size: int, padded: int) -> None:
        self._rows, self._size, self._padded = rows, size, padded

    def __len__(self) -> int:
        return len(self._rows) // self._size * self._padded

    def __getitem__(self, index: int) -> Any:
        epoch, place = divmod(index, self._padded)
        return self._rows[epoch * self._size + place % self._size]
