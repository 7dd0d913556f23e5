"""From flags to instruction data or pairs: which samples are named, and what can be said of them before ranks meet.

Nothing here needs torch.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.posttrain.raw_records import RawRecords
from mindspeed_llm.tasks.preprocess.command.reuse import read_content
from mindspeed_llm.tasks.preprocess.handlers import Kind
from mindspeed_llm.tasks.preprocess.once import warn_once
from mindspeed_llm.tasks.preprocess.prefix_kinds import describe, kinds_at, output_prefix
from mindspeed_llm.tasks.preprocess.sample_sets import SampleSet
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer
from mindspeed_llm.training.data.content import check_content
from mindspeed_llm.training.data.sources import Blend, named_blends
from mindspeed_llm.training.data.tokens import TokenRules, named_tokenizer, vocabulary_of

_LOG = logging.getLogger("mindspeed_llm")
_OF_RECORDS = ("handler_name", "map_keys", "enable_thinking", "drop_thinking", "reasoning_effort", "mask_history")


def check_instructions(args: Namespace, kind: Kind = "instruction") -> None:
    """Check all that can be checked before data are worked through.

    Raises:
        UserError: flags contradict each other, files are missing or of another kind, made with another tokenizer, a
            record cannot be read, there is no chat template.
    """
    tokenizer = named_tokenizer(args)
    for blend in instruction_blends(args, kind):
        for name in blend.names:
            if isinstance(name, Path):
                check_prepared(blend.flag, CutSampleSet(name, args.seq_length, kind), args, tokenizer)
                if idle := [f"--{flag.replace('_', '-')}" for flag in _OF_RECORDS if flag in args.given]:
                    _LOG.info("%s %s: no effect from %s, its samples are made", blend.flag, name, ", ".join(idle))
            else:
                name.check(args, tokenizer)


def instruction_blends(args: Namespace, kind: Kind = "instruction") -> list[Blend[RawRecords]]:
    """The blends that the flags name, of instruction data or pairwise data. Raises UserError naming the flags."""
    return named_blends(args, partial(_named, kind))


def _named(kind: Kind, flag: str, name: str) -> Path | RawRecords:
    prefix = Path(name)
    if kinds_at(prefix) or output_prefix(prefix) is not None:
        return prefix
    if prefix.exists():
        return RawRecords(flag, prefix, kind)
    raise UserError(
        f"{flag}: {name} is neither a file of records nor the prefix of samples that preprocess_data.py made; "
        f"{describe(prefix)}"
    )


def check_prepared(flag: str, samples: SampleSet, args: Namespace, tokenizer: Tokenizer | None) -> None:
    """Look into samples that `flag` names, and at what the summary beside them says.

    Raises UserError where they do not belong to the model or to the flags; warns where they may not.
    """
    prefix, rules = samples.prefix, TokenRules(vocab_size=vocabulary_of(args, tokenizer))
    if not len(samples):
        raise UserError(f"{flag}: {prefix} has no sample with an answer within --seq-length {args.seq_length} tokens")
    check_content(flag, [reader for key, reader in samples.readers.items() if key.endswith("input_ids")], rules)
    content = read_content(prefix)
    if not content:
        return
    if content.get("pack") and content["seq_length"] > args.seq_length:
        raise UserError(
            f"{flag}: the rows of {prefix} are packed to {content['seq_length']} tokens, more than --seq-length "
            f"{args.seq_length}; give --seq-length {content['seq_length']}, or pack the data anew"
        )
    for name in ("pack", "neat_pack"):
        if getattr(args, name) and not content.get(name):
            words = name.replace("_", "-")
            raise UserError(
                f"--{words}: {prefix} was made without; leave it out, or preprocess the data again with --{words}"
            )
    if content.get("neat_pack") and not args.reset_attention_mask:
        warn_once(
            f"{flag}: {prefix} was made with --neat-pack, but without --reset-attention-mask the samples of a row see "
            "each other"
        )
    if content.get("pack") and not content.get("neat_pack") and args.reset_attention_mask:
        warn_once(
            f"{flag}: --reset-attention-mask has no effect on {prefix}: made without --neat-pack, it does not say "
            "where the samples of a row begin"
        )
    made, options = content.get("prompt_type"), content["options"]
    if args.prompt_type is not None and made != args.prompt_type:
        warn_once(f"{flag}: --prompt-type {args.prompt_type} has no effect: {prefix} was made with {made}")
    if tokenizer is not None and options.get("tokenizer") not in (None, tokenizer.identity()):
        warn_once(
            f"{flag}: {prefix} was made with another tokenizer than the one of this run, or before its files were "
            "changed; preprocess it again if its token ids differ"
        )


class CutSampleSet(SampleSet):
    """The samples of a prefix that have a target within the first `length` tokens, cut to these; of pairs, those that
    have one on both sides.

    `num_cut` are longer, `num_left_out` of the prefix are not here: their prompt leaves no room for an answer. A prompt
    is never cut, which would leave an answer to half a question.
    """

    def __init__(self, prefix: Path, length: int, kind: Kind = "instruction") -> None:
        super().__init__(prefix, kind)
        self._length = length
        self.num_stored = super().__len__()
        long: set[int] = set()
        lost: set[int] = set()
        for labels in (reader for key, reader in self.readers.items() if key.endswith("labels")):
            numbers = np.flatnonzero(labels.lengths > length).tolist()
            long.update(numbers)
            # The first token of a row is never predicted.
            lost.update(number for number in numbers if (labels.get(number, 1, length - 1) == IGNORE_INDEX).all())
        self._kept = np.delete(np.arange(self.num_stored), sorted(lost))
        self.num_left_out, self.num_cut = len(lost), len(long) - len(lost)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {key: values[: self._length] for key, values in super().__getitem__(int(self._kept[index])).items()}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int32; of a pair, the longer side's."""
        return np.minimum(super().lengths[self._kept], self._length)

    def numbers_of(self, documents: range) -> range:
        """The samples here that are among `documents` of the prefix."""
        start, stop = np.searchsorted(self._kept, [documents.start, documents.stop]).tolist()
        return range(start, stop)


def left_out(sets: Sequence[CutSampleSet], length: int) -> list[str]:
    """A line for each prefix of which samples are cut or left out."""
    return [
        f"{samples.prefix}: {samples.num_cut} samples are cut to --seq-length {length}, {samples.num_left_out} are "
        "left out: no answer begins within it"
        for samples in sets
        if samples.num_cut or samples.num_left_out
    ]
