"""Turns -> one training sample: token ids with labels, cut to a length.

Labels here are not shifted: labels[t] belongs to ids[t]. -100 means no target.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_llm.tasks.preprocess.records import UnusableRecord
from mindspeed_llm.tasks.preprocess.render import Turn

IGNORE_INDEX = -100

NO_ROOM = "prompt fills cutoff_len, no room for the reply: raise cutoff_len to keep it"
NO_TARGET = "no reply that carries loss"


@dataclass(frozen=True)
class SampleOptions:
    """How turns become samples. `cutoff_len` in tokens; see the fields of the same names in the data section."""

    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False


def build_sample(
    turns: Sequence[Turn], options: SampleOptions, efficient_eos_id: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, labels), int32 of equal length at most `cutoff_len`.

    A turn that is too long is cut by `turn_budget`; turns after the cut are left out (before it, with mask_history,
    where the last turn matters most). With `efficient_eos_id` a trained reply is closed by that id as the label of the
    next turn's first token, and the id is appended to the whole. Raises UnusableRecord when no target is left.
    """
    room = options.cutoff_len - (efficient_eos_id is not None)
    kept: list[tuple[Turn, bool]] = []
    order = reversed(turns) if options.mask_history else iter(turns)
    reason = NO_TARGET
    seen_reply = False
    for turn in order:
        source_len, target_len = turn_budget(len(turn.source), len(turn.target), room)
        if turn.target and target_len == 0:
            reason = NO_ROOM
            break
        room -= source_len + target_len
        trained = turn.train and bool(turn.target) and not (options.mask_history and seen_reply)
        seen_reply = seen_reply or bool(turn.target)
        kept.append((Turn(turn.source[:source_len], turn.target[:target_len]), trained))
    if options.mask_history:
        kept.reverse()
    if not any(trained for _, trained in kept):
        raise UnusableRecord(reason)

    ids: list[int] = []
    labels: list[int] = []
    reply_before_trained = False
    for turn, trained in kept:
        source_labels = list(turn.source) if options.train_on_prompt else [IGNORE_INDEX] * len(turn.source)
        if efficient_eos_id is not None and reply_before_trained and source_labels:
            source_labels[0] = efficient_eos_id
        ids += turn.source + turn.target
        labels += source_labels + (turn.target if trained else [IGNORE_INDEX] * len(turn.target))
        reply_before_trained = trained
    if efficient_eos_id is not None:
        ids.append(efficient_eos_id)
        labels.append(efficient_eos_id if reply_before_trained else IGNORE_INDEX)
    # The first token of a sample is never predicted.
    if all(label == IGNORE_INDEX for label in labels[1:]):
        raise UnusableRecord(NO_TARGET)
    return np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32)


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
