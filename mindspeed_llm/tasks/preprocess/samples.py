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
    """How turns become samples. `cutoff_len` in tokens; `mask_history` leaves loss to the last reply; `eod_id` ends
    every sample, and carries loss like the end mark of the reply before it.
    """

    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False
    eod_id: int | None = None


def build_sample(turns: Sequence[Turn], options: SampleOptions, efficient_eos_id: int | None = None) -> Sample:
    """Return (ids, labels), int32 of equal length at most `cutoff_len`.

    A sample is the beginning of the conversation: as many whole turns as fit, then one more whose reply is cut at the
    length. A prompt is never cut: where it leaves no token of its reply, its turn is left out. With mask_history the
    turn that counts is the last, an empty reply included, and all turns before it are needed; `shortened` leaves out
    those that are too many before they come here.

    With `efficient_eos_id` a trained reply is closed by that id as the label of the next turn's first token, and the id
    is appended to the whole. `eod_id` is appended where the sample does not end in it. Neither is a target behind a
    reply that was cut, which would teach to stop in mid-sentence, or that carries no loss. Raises UnusableRecord when
    no reply is left to train on (NO_ROOM where the length is the cause).
    """
    trained = _trained(turns, options)
    kept = _kept(turns, options, efficient_eos_id)
    ids, labels, has_target = _joined(kept, trained, options, efficient_eos_id)
    sample = np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32)
    # The first token of a sample is never predicted.
    if not has_target or (sample[1][1:] == IGNORE_INDEX).all():
        has_end = efficient_eos_id is not None or options.eod_id is not None
        is_lost = any(train and (turn.target or has_end) for turn, train in zip(turns, trained, strict=True))
        raise UnusableRecord(NO_ROOM if is_lost and len(kept) < len(turns) else NO_TARGET)
    return sample


def build_pair(
    chosen: Sequence[Turn], rejected: Sequence[Turn], options: SampleOptions, efficient_eos_id: int | None = None
) -> tuple[Sample, Sample]:
    """The samples of two replies to one prompt: as `build_sample` with mask_history, so that only the last reply of
    each carries loss.

    The prompt, which both have in common, is whole on both sides: replies are cut at the same place.
    """
    options = replace(options, mask_history=True)
    chosen_sample, rejected_sample = (build_sample(turns, options, efficient_eos_id) for turns in (chosen, rejected))
    return chosen_sample, rejected_sample


def fits(turns: Sequence[Turn], options: SampleOptions, efficient_eos_id: int | None = None) -> bool:
    """Whether the sample of these turns is whole: they need no more than `cutoff_len` tokens, with what ends them."""
    kept = _kept(turns, options, efficient_eos_id)
    return len(kept) == len(turns) and all(is_whole for _, is_whole in kept)


def _trained(turns: Sequence[Turn], options: SampleOptions) -> list[bool]:
    """Which replies carry loss."""
    last = max((index for index, turn in enumerate(turns) if turn.has_reply), default=-1)
    return [
        turn.has_reply and turn.train and (index == last or not options.mask_history)
        for index, turn in enumerate(turns)
    ]


def _kept(turns: Sequence[Turn], options: SampleOptions, efficient_eos_id: int | None) -> list[tuple[Turn, bool]]:
    """The turns from the first on that fit in, the last of them cut, each with whether it is whole."""
    kept: list[tuple[Turn, bool]] = []
    room = options.cutoff_len
    for turn in turns:
        needed = len(turn.source) + len(turn.target)
        tokens = turn.target or turn.source
        if needed + len(_closing(tokens, options, efficient_eos_id)) > room:
            # What the cut reply will end in is not known before: room is left for all that may follow.
            target_room = room - len(turn.source) - len(_closing([], options, efficient_eos_id))
            if turn.target and target_room > 0:
                kept.append((replace(turn, target=turn.target[:target_room]), False))
            return kept
        kept.append((turn, True))
        room -= needed
    return kept


def _joined(
    kept: Sequence[tuple[Turn, bool]],
    trained: Sequence[bool],
    options: SampleOptions,
    efficient_eos_id: int | None,
) -> tuple[list[int], list[int], bool]:
    """ids, labels, and whether a reply, or its end, is a target."""
    ids: list[int] = []
    labels: list[int] = []
    is_end_taught = has_target = False
    for (turn, is_whole), carries_loss in zip(kept, trained, strict=False):
        source_labels = list(turn.source) if options.train_on_prompt else [IGNORE_INDEX] * len(turn.source)
        if efficient_eos_id is not None and is_end_taught and source_labels:
            source_labels[0] = efficient_eos_id
        ids += turn.source + turn.target
        labels += source_labels + (turn.target if carries_loss else [IGNORE_INDEX] * len(turn.target))
        # Text behind the last reply takes the label of efficient_eos; it does not part the reply from an eod.
        is_end_taught = carries_loss and is_whole if turn.has_reply else is_end_taught and efficient_eos_id is None
        has_target = has_target or (carries_loss and (bool(turn.target) or efficient_eos_id is not None))
    for token in _closing(ids, options, efficient_eos_id):
        ids.append(token)
        labels.append(token if is_end_taught else IGNORE_INDEX)
        has_target = has_target or is_end_taught
    return ids, labels, has_target


def _closing(ids: Sequence[int], options: SampleOptions, efficient_eos_id: int | None) -> list[int]:
    """The ids that are appended to a sample that ends in `ids`."""
    closing = [] if efficient_eos_id is None else [efficient_eos_id]
    last = [*ids[-1:], *closing][-1:]
    if options.eod_id is not None and last != [options.eod_id]:
        closing.append(options.eod_id)
    return closing
