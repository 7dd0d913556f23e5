"""Labels, end markers and cuts of single samples, by hand."""

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.records import UnusableRecord
from mindspeed_llm.tasks.preprocess.render import Turn
from mindspeed_llm.tasks.preprocess.samples import (
    NO_ROOM,
    NO_TARGET,
    SampleOptions,
    build_pair,
    build_sample,
    turn_budget,
)

TURNS = [Turn([1, 2], [3, 4]), Turn([5, 6], [7, 8])]
EOS = 99
N = -100


def sample(turns=TURNS, eos=None, **options):
    ids, labels = build_sample(turns, SampleOptions(**{"cutoff_len": 100, **options}), eos)
    assert ids.dtype == labels.dtype == np.int32
    return ids.tolist(), labels.tolist()


def test_replies_carry_loss():
    assert sample() == ([1, 2, 3, 4, 5, 6, 7, 8], [N, N, 3, 4, N, N, 7, 8])


def test_mask_history_and_train_on_prompt():
    assert sample(mask_history=True) == ([1, 2, 3, 4, 5, 6, 7, 8], [N, N, N, N, N, N, 7, 8])
    assert sample(train_on_prompt=True)[1] == [1, 2, 3, 4, 5, 6, 7, 8]
    # Text behind the last reply is no reply.
    assert sample([*TURNS, Turn([9], [])], mask_history=True)[1] == [N, N, N, N, N, N, 7, 8, N]


def test_efficient_eos_is_the_label_of_the_next_turn():
    assert sample(eos=EOS) == ([1, 2, 3, 4, 5, 6, 7, 8, EOS], [N, N, 3, 4, EOS, N, 7, 8, EOS])
    assert sample(eos=EOS, mask_history=True)[1] == [N, N, N, N, N, N, 7, 8, EOS]
    untrained = [Turn([1, 2], [3, 4], train=False), TURNS[1]]
    assert sample(untrained, eos=EOS)[1] == [N, N, N, N, N, N, 7, 8, EOS]


def test_cut():
    ids, labels = sample(cutoff_len=7)
    assert len(ids) == 7 and labels[4:] == [N, N, 7]
    # No room for the second reply: the conversation ends before its prompt.
    assert sample(cutoff_len=6)[0] == [1, 2, 3, 4]
    assert sample(cutoff_len=5, mask_history=True) == ([5, 6, 7, 8], [N, N, 7, 8])
    assert len(sample(cutoff_len=9, eos=EOS)[0]) == 9
    assert len(sample(cutoff_len=8, eos=EOS)[0]) == 8


@pytest.mark.parametrize(
    ("source", "target", "room", "kept"),
    [
        (3, 4, 7, (3, 4)),
        (10, 3, 10, (10, 0)),  # the prompt fills the room
        (9, 3, 10, (7, 3)),  # target below half: kept whole
        (3, 9, 10, (3, 7)),  # source below half: kept whole
        (6, 9, 10, (4, 6)),  # both cut in proportion: 10 * 9 // 15
    ],
)
def test_turn_budget(source, target, room, kept):
    assert turn_budget(source, target, room) == kept


def test_samples_without_target_are_unusable():
    with pytest.raises(UnusableRecord, match=NO_ROOM):
        sample(cutoff_len=2)
    with pytest.raises(UnusableRecord, match=NO_TARGET):
        sample([Turn([1], [2], train=False)])


def pair(chosen, rejected, eos=None, **options):
    sides = build_pair(chosen, rejected, SampleOptions(**{"cutoff_len": 100, **options}), eos)
    return [(ids.tolist(), labels.tolist()) for ids, labels in sides]


LONG = [TURNS[0], Turn([5, 6], [11, 12, 13, 14, 15])]


def test_pairs_carry_loss_on_the_last_reply_only():
    assert pair(TURNS, LONG) == [
        ([1, 2, 3, 4, 5, 6, 7, 8], [N, N, N, N, N, N, 7, 8]),
        ([1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15], [N, N, N, N, N, N, 11, 12, 13, 14, 15]),
    ]
    assert [labels[-1] for _, labels in pair(TURNS, LONG, EOS)] == [EOS, EOS]


@pytest.mark.parametrize("cutoff_len", range(4, 13))
@pytest.mark.parametrize("eod_id", [None, 98])
def test_cutting_leaves_both_sides_the_same_prompt(cutoff_len, eod_id):
    """Also where the chosen side alone would have fitted."""
    sides = pair(TURNS, LONG, cutoff_len=cutoff_len, eod_id=eod_id)
    prompts = [ids[: next(i for i, label in enumerate(labels) if label != N)] for ids, labels in sides]
    assert prompts[0] == prompts[1]
    assert all(len(ids) <= cutoff_len for ids, _ in sides)
    for (ids, labels), reply in zip(sides, (7, 11), strict=True):
        is_whole = reply == 7 or 15 in ids
        assert eod_id is None or (ids[-1], labels[-1]) == (eod_id, eod_id if is_whole else N)


def test_a_pair_without_room_on_one_side_is_unusable():
    with pytest.raises(UnusableRecord, match=NO_ROOM):
        pair(TURNS, [TURNS[0], Turn([5, 6, 7, 8], [9])], cutoff_len=4)


def test_eod_ends_the_sample_once():
    assert sample(eod_id=EOS) == ([1, 2, 3, 4, 5, 6, 7, 8, EOS], [N, N, 3, 4, N, N, 7, 8, EOS])
    assert sample(eod_id=8) == sample()
    assert sample(eos=EOS, eod_id=EOS) == sample(eos=EOS)
    # Room is left for it only where it is needed.
    assert sample(eod_id=8, cutoff_len=8) == sample()
    # The last reply is cut for it, so that it is no target.
    assert sample(eod_id=EOS, cutoff_len=8) == ([1, 2, 3, 4, 5, 6, 7, EOS], [N, N, 3, 4, N, N, 7, N])


@pytest.mark.parametrize("mask_history", [False, True])
def test_the_end_of_a_reply_that_was_cut_is_no_target(mask_history):
    """Neither the closing label of efficient_eos nor the appended eod teaches to stop in mid-sentence."""
    turns = [Turn([1, 2], list(range(10, 30)))]
    for whole, cutoff_len in ((True, 40), (False, 12)):
        options = SampleOptions(cutoff_len=cutoff_len, mask_history=mask_history, eod_id=8)
        for eos in (None, 9):
            ids, labels = build_sample(turns, options, eos)
            assert ids[-1] == 8 and (labels[-1] == 8) == whole
            if eos is not None:
                assert ids[-2] == 9 and (labels[-2] == 9) == whole
            assert len(ids) <= cutoff_len
            assert list(labels[:3]) == [-100, -100, 10]
