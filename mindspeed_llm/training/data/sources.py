"""From flags to documents: which files are named, and which of their documents train, valid and test get.

What can be said without working through data is said here, without torch, so that a mistake is answered before ranks
meet.
"""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.blending import parse_blend
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.once import warn_once
from mindspeed_llm.tasks.preprocess.pretrain_blend import PretrainSource
from mindspeed_llm.tasks.preprocess.pretrain_inputs import find_prefix
from mindspeed_llm.tasks.preprocess.pretrain_samples import samples_per_epoch
from mindspeed_llm.tasks.preprocess.readers import data_files
from mindspeed_llm.tasks.preprocess.splits import parse_split, split_documents
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer
from mindspeed_llm.training.data.content import check_content
from mindspeed_llm.training.data.raw_text import RawText
from mindspeed_llm.training.data.tokens import TokenRules, named_tokenizer, token_rules

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"
NAMES: Mapping[Split, str] = {"train": "training", "valid": "validation", "test": "test"}
"""The parts as messages call them."""


Raw = TypeVar("Raw")
"""Raw files, before they are tokenized."""
Made = TypeVar("Made")
"""Part of the data, in the form that a task takes."""


@dataclass(frozen=True)
class Blend(Generic[Raw]):
    """What a flag names: prefixes of indexed files and raw files, with a weight for each or none at all; `splits` are
    the parts that it is for."""

    flag: str
    names: tuple[Path | Raw, ...]
    weights: tuple[float, ...] | None
    splits: tuple[Split, ...]

    @property
    def texts(self) -> list[Raw]:
        """The raw files among the names."""
        return [name for name in self.names if not isinstance(name, Path)]


@dataclass(frozen=True)
class Part:
    """The documents of one of train, valid and test; of every file of a blend those in `sources`."""

    split: Split
    flag: str
    sources: tuple[PretrainSource, ...]
    weights: tuple[float, ...] | None


def check_data(args: Namespace, tokenizer: Tokenizer | None = None) -> None:
    """Check all that can be checked before data are worked through.

    Args:
        args: validated arguments.
        tokenizer: None loads the one that the flags name.

    Raises:
        UserError: flags contradict each other, a file is missing or damaged, weights are wrong, a part that is needed
            is empty or shorter than a sample, a record has no text, ids do not fit the vocabulary.
    """
    blends = named_blends(args, named_text)
    tokenizer = tokenizer or named_tokenizer(args)
    rules = token_rules(args, tokenizer)
    for blend in blends:
        for text in blend.texts:
            text.check(args, tokenizer)
        if not blend.texts:
            checked_parts(blend, [name for name in blend.names if isinstance(name, Path)], args, rules, tokenizer)


def named_blends(args: Namespace, named: Callable[[str, str], Path | Raw]) -> list[Blend[Raw]]:
    """The blends that the flags name, one for --data-path or one for each of train, valid and test; none with
    --mock-data.

    `named` says what a name stands for, given the flag and the name. Raises UserError naming the flags.
    """
    paths = {f"--{split}-data-path": getattr(args, f"{split}_data_path") for split in SPLITS}
    each = [flag for flag, items in paths.items() if items]
    given = (["--data-path"] if args.data_path else []) + each
    if args.mock_data:
        if others := given + (["--split"] if args.split is not None else []):
            raise UserError(f"--mock-data makes samples up, so that {', '.join(others)} cannot be used; leave one out")
        return []
    if not given:
        raise UserError(
            "no data are named: give --data-path PREFIX (or a raw file), --train-data-path, or --mock-data for samples "
            "that are made up"
        )
    if args.data_path:
        if each:
            raise UserError(f"--data-path is for all of training, validation and test; leave it or {each[0]} out")
        parse_split(args.split or DEFAULT_SPLIT, "--split")
        return [_blend("--data-path", args.data_path, SPLITS, named)]
    if args.split is not None:
        raise UserError(f"--split {args.split} cuts the files of --data-path, but {each[0]} is given; leave one out")
    if not args.train_data_path:
        raise UserError(f"{each[0]} is given without --train-data-path: there is nothing to train on")
    wanted = [split for split in SPLITS if paths[f"--{split}-data-path"] and (split == "train" or args.eval_iters)]
    return [_blend(f"--{split}-data-path", paths[f"--{split}-data-path"], (split,), named) for split in wanted]


def _blend(
    flag: str, items: Sequence[str], splits: tuple[Split, ...], named: Callable[[str, str], Path | Raw]
) -> Blend[Raw]:
    names, weights = parse_blend(items, field=flag)
    if len(splits) == 1 and len(names) == 1:
        # As in megatron-core: the weight of a single file says nothing, and is no reason to lay more samples out.
        weights = None
    return Blend(flag, tuple(named(flag, name) for name in names), None if weights is None else tuple(weights), splits)


def named_text(flag: str, name: str) -> Path | RawText:
    """The prefix of an indexed file, or raw text. Raises UserError where it is neither."""
    prefix = find_prefix(name, (Path(),), where=flag)
    if prefix is not None:
        return prefix
    path = Path(name)
    if path.exists():
        return RawText(flag, path, tuple(data_files(path)))
    known = [file.name.removesuffix(".idx") for file in path.parent.glob("*.idx")]
    near = difflib.get_close_matches(path.name, sorted(known), n=1)
    raise UserError(
        f"{flag}: {name} is neither the prefix of {name}.bin and {name}.idx, nor a raw file; "
        + (f"did you mean {path.parent / near[0]}?" if near else f"{path.parent} has no data of such a name")
    )


def checked_parts(
    blend: Blend[RawText], prefixes: Sequence[Path], args: Namespace, rules: TokenRules, tokenizer: Tokenizer | None
) -> list[Part]:
    """The parts of a blend whose names stand for the indexed files `prefixes`. Raises UserError, see `check_data`."""
    readers = []
    for prefix in prefixes:
        reader = IndexedReader(prefix)
        if not len(reader):
            raise UserError(f"{blend.flag}: {prefix} holds no documents")
        readers.append(reader)
    check_content(blend.flag, readers, rules, tokenizer)
    return _split_parts(blend, readers, args)


def _split_parts(blend: Blend[RawText], readers: Sequence[IndexedReader], args: Namespace) -> list[Part]:
    """The parts of a blend that are wanted, see `wanted_parts`; none is shorter than a sample."""
    split = args.split or DEFAULT_SPLIT
    cut = [split_documents(len(reader), split, "--split") for reader in readers]
    shares = parse_split(split, "--split")

    def make(name: Split, place: int | None) -> Part | str:
        documents = [range(len(reader)) for reader in readers] if place is None else [parts[place] for parts in cut]
        sources = tuple(PretrainSource(reader, part) for reader, part in zip(readers, documents, strict=True))
        part = Part(name, blend.flag, sources, blend.weights)
        return _problem(part, args, share=None if place is None else shares[place] / sum(shares)) or part

    return wanted_parts(blend, args, make)


def wanted_parts(blend: Blend[Any], args: Namespace, make: Callable[[Split, int | None], Made | str]) -> list[Made]:
    """The parts of a blend that are wanted; validation and test are left out without --eval-iters or without a share.

    With the default of --split a part that cannot be made is left out and reported. Raises UserError where that happens
    to training, or to a part that was asked for.

    Args:
        blend: what a flag names.
        args: validated arguments.
        make: the part of a name, or why there is none, as a message; also given its place among the shares of --split,
            or None where the blend is for this part alone.
    """
    is_cut = len(blend.splits) > 1
    split = args.split or DEFAULT_SPLIT
    shares = parse_split(split, "--split")
    found = []
    for place, name in enumerate(SPLITS):
        if name not in blend.splits or (name != "train" and not args.eval_iters):
            continue
        if is_cut and not shares[place]:
            if name == "train":
                raise UserError(f"--split {split} has no share for training; give its first number a value")
            continue
        made = make(name, place if is_cut else None)
        if not isinstance(made, str):
            found.append(made)
        elif name == "train" or not is_cut or args.split is not None:
            raise UserError(made)
        else:
            warn_once(f"no {NAMES[name]}: {made}")
    return found


def _problem(part: Part, args: Namespace, *, share: float | None) -> str | None:
    """Why samples cannot be made of a part, as a message; None where they can."""
    purpose = "the test" if part.split == "test" else NAMES[part.split]
    length = args.seq_length
    weights = part.weights or (1.0,) * len(part.sources)
    used = [source for source, weight in zip(part.sources, weights, strict=True) if weight]
    without = "" if part.split == "train" else ", set --eval-iters 0"
    if share is not None and (empty := [source for source in used if not len(source.documents)]):
        # Without weights files of a few documents may be left out, but not all.
        if part.weights is not None or len(empty) == len(used):
            total = sum(len(source.reader) for source in empty)
            return (
                f"--split {args.split or DEFAULT_SPLIT} leaves no document of "
                f"{', '.join(str(source.reader.prefix) for source in empty)} for {purpose}: a share of {share:.3g} of "
                f"{total} documents; raise it{without}, or use data of more documents"
            )
    sizes = {source.reader.prefix: source.num_tokens() for source in used}
    short = [name for name, count in sizes.items() if not samples_per_epoch(count, length)]
    if short and (part.weights is not None or len(short) == len(sizes)):
        return (
            f"{part.flag}: {short[0]} has {sizes[short[0]]} tokens for {purpose}, but a sample of --seq-length "
            f"{length} takes {length + 1} and would hold them several times; use more data{without}, or a smaller "
            "--seq-length"
        )
    return None
