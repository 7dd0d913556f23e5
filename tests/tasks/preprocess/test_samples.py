"""Labels, end markers and cuts of single samples, by hand."""

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.records import UnusableRecord
from mindspeed_llm.tasks.preprocess.render import Turn
from mindspeed_llm.tasks.preprocess.samples import NO_ROOM, NO_TARGET, SampleOptions, build_sample, turn_budget

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
