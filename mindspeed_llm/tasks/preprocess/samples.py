"""Turns -> one training sample: token ids with labels, cut to a length.

Labels here are not shifted: labels[t] belongs to ids[t]. -100 means no target.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindspeed_llm.tasks.preprocess.records import UnusableRecord
from mindspeed_llm.tasks.preprocess.render import Turn

IGNORE_INDEX = -100
UNLIMITED = 2**31 - 1
"""A `cutoff_len` that cuts nothing: lengths are stored as int32."""

NO_ROOM = "prompt fills cutoff_len / --seq-length, no room for the reply: raise it to keep the record"
NO_TARGET = "no reply that carries loss"

Sample = tuple[np.ndarray, np.ndarray]
"""(ids, labels), int32 of equal length."""


@dataclass(frozen=True)
class SampleOptions:
    """How turns become samples. `cutoff_len` in tokens; `eod_id` ends every sample, which carries loss too."""

    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False
    eod_id: int | None = None


def build_sample(turns: Sequence[Turn], options: SampleOptions, efficient_eos_id: int | None = None) -> Sample:
    """Return (ids, labels), int32 of equal length at most `cutoff_len`.

    A turn that is too long is cut by `turn_budget`; turns after the cut are left out (before it, with mask_history,
    where the last turn matters most). With `efficient_eos_id` a trained reply is closed by that id as the label of the
    next turn's first token, and the id is appended to the whole. `eod_id` is appended where the sample does not end in
    it. Neither is a target after a reply that was cut: it would teach to stop in mid-sentence. Raises UnusableRecord
    when no target is left.
    """
    (sample,) = _samples([turns], options, efficient_eos_id, None)
    return sample


def build_pair(
    chosen: Sequence[Turn], rejected: Sequence[Turn], options: SampleOptions, efficient_eos_id: int | None = None
) -> tuple[Sample, Sample]:
    """The samples of two replies to one prompt: as `build_sample` with mask_history, so that only the last reply of
    each carries loss.

    Both are cut as if each had the longer reply, so that cutting leaves both the same prompt.
    """
    options = replace(options, mask_history=True)
    lasts = [next((turn for turn in reversed(turns) if turn.target), turns[-1]) for turns in (chosen, rejected)]
    longest = max(len(turn.source) for turn in lasts), max(len(turn.target) for turn in lasts)
    chosen_sample, rejected_sample = _samples([chosen, rejected], options, efficient_eos_id, longest)
    return chosen_sample, rejected_sample


def _samples(
    sides: Sequence[Sequence[Turn]],
    options: SampleOptions,
    efficient_eos_id: int | None,
    last_lengths: tuple[int, int] | None,
) -> list[Sample]:
    joined = [_joined(turns, options, efficient_eos_id, last_lengths) for turns in sides]
    eod_id = options.eod_id
    if eod_id is not None:
        if any(ids[-1] != eod_id and len(ids) == options.cutoff_len for ids, _, _ in joined):
            shorter = replace(options, cutoff_len=options.cutoff_len - 1)
            joined = [_joined(turns, shorter, efficient_eos_id, last_lengths) for turns in sides]
        for ids, labels, is_whole in joined:
            if ids[-1] != eod_id:
                ids.append(eod_id)
                labels.append(eod_id if is_whole else IGNORE_INDEX)
    samples = [(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32)) for ids, labels, _ in joined]
    # The first token of a sample is never predicted.
    if any((labels[1:] == IGNORE_INDEX).all() for _, labels in samples):
        raise UnusableRecord(NO_TARGET)
    return samples


def _kept_turns(
    turns: Sequence[Turn], options: SampleOptions, room: int, last_lengths: tuple[int, int] | None
) -> list[tuple[Turn, bool, bool]]:
    """The turns that fit in `room` tokens, cut, each with whether its reply carries loss and whether it is whole.

    `last_lengths` (source, target) are those that the last reply's turn counts with. Raises UnusableRecord when no
    reply that carries loss is left.
    """
    kept: list[tuple[Turn, bool, bool]] = []
    order = reversed(turns) if options.mask_history else iter(turns)
    reason = NO_TARGET
    seen_reply = False
    for turn in order:
        lengths = len(turn.source), len(turn.target)
        if last_lengths is not None and turn.target and not seen_reply:
            lengths = last_lengths
        source_len, target_len = turn_budget(*lengths, room)
        if turn.target and target_len == 0:
            reason = NO_ROOM
            break
        room -= source_len + target_len
        trained = turn.train and bool(turn.target) and not (options.mask_history and seen_reply)
        seen_reply = seen_reply or bool(turn.target)
        is_whole = target_len >= len(turn.target)
        kept.append((Turn(turn.source[:source_len], turn.target[:target_len]), trained, is_whole))
    if options.mask_history:
        kept.reverse()
    if not any(trained for _, trained, _ in kept):
        raise UnusableRecord(reason)
    return kept


def _joined(
    turns: Sequence[Turn],
    options: SampleOptions,
    efficient_eos_id: int | None,
    last_lengths: tuple[int, int] | None,
) -> tuple[list[int], list[int], bool]:
    """ids, labels, and whether the last reply is whole."""
    room = options.cutoff_len - (efficient_eos_id is not None)
    ids: list[int] = []
    labels: list[int] = []
    is_end_taught = False
    is_whole = True
    for turn, trained, is_whole in _kept_turns(turns, options, room, last_lengths):
        source_labels = list(turn.source) if options.train_on_prompt else [IGNORE_INDEX] * len(turn.source)
        if efficient_eos_id is not None and is_end_taught and source_labels:
            source_labels[0] = efficient_eos_id
        ids += turn.source + turn.target
        labels += source_labels + (turn.target if trained else [IGNORE_INDEX] * len(turn.target))
        is_end_taught = trained and is_whole
    if efficient_eos_id is not None:
        ids.append(efficient_eos_id)
        labels.append(efficient_eos_id if is_end_taught else IGNORE_INDEX)
    return ids, labels, is_whole


def turn_budget(source_len: int, target_len: int, room: int) -> tuple[int, int]:
    """Lengths (source, target) that a turn keeps within `room` tokens; target 0 where the prompt alone fills the room.

    The rule is LLaMA-Factory's: a target shorter than half the room is kept whole, else a source shorter than half the
    room, else both are cut in proportion. A prompt that fills the room is not cut down: its reply would answer a
    question that the model cannot see.
    """
    if source_len + target_len <= room:
        return source_len, target_len
    if source_len >= room:
        return source_len, 0
    if target_len * 2 < room:
        target_room = room
    elif source_len * 2 < room:
        target_room = room - source_len
    else:
        target_room = room * target_len // (source_len + target_len)
    kept_target = min(target_room, target_len)
    return min(source_len, room - kept_target), kept_target
