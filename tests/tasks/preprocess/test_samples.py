"""Labels, end markers and cuts of single samples, by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.tasks.preprocess import samples
from mindspeed_llm.tasks.preprocess.records import UnusableRecord
from mindspeed_llm.tasks.preprocess.render import Turn
from mindspeed_llm.tasks.preprocess.samples import (
    NO_ROOM,
    NO_TARGET,
    SampleOptions,
    build_pair,
    build_sample,
    fits,
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
    assert sample([*TURNS, Turn([9], [], has_reply=False)], mask_history=True)[1] == [N, N, N, N, N, N, 7, 8, N]


def test_efficient_eos_is_the_label_of_the_next_turn():
    assert sample(eos=EOS) == ([1, 2, 3, 4, 5, 6, 7, 8, EOS], [N, N, 3, 4, EOS, N, 7, 8, EOS])
    assert sample(eos=EOS, mask_history=True)[1] == [N, N, N, N, N, N, 7, 8, EOS]
    untrained = [Turn([1, 2], [3, 4], train=False), TURNS[1]]
    assert sample(untrained, eos=EOS)[1] == [N, N, N, N, N, N, 7, 8, EOS]


def test_cut():
    """Whole turns from the beginning on, then one whose reply is cut; a prompt never is."""
    assert sample(cutoff_len=7) == ([1, 2, 3, 4, 5, 6, 7], [N, N, 3, 4, N, N, 7])
    # No room for the second reply: the conversation ends before its prompt.
    for cutoff_len in (4, 5, 6):
        assert sample(cutoff_len=cutoff_len) == ([1, 2, 3, 4], [N, N, 3, 4])
    assert sample(cutoff_len=3) == ([1, 2, 3], [N, N, 3])
    assert sample(cutoff_len=9, eos=EOS)[1] == [N, N, 3, 4, EOS, N, 7, 8, EOS]
    assert sample(cutoff_len=8, eos=EOS) == ([1, 2, 3, 4, 5, 6, 7, EOS], [N, N, 3, 4, EOS, N, 7, N])
    assert sample(cutoff_len=7, eos=EOS) == ([1, 2, 3, 4, EOS], [N, N, 3, 4, EOS])


def test_what_is_behind_the_cut_is_left_out():
    """Text behind a reply that was cut, and turns whose reply is empty, whatever their length."""
    tail = Turn([50, 51, 52], [], has_reply=False)
    assert sample([TURNS[0], tail], cutoff_len=3)[0] == [1, 2, 3]
    assert sample([TURNS[0], tail], cutoff_len=6)[0] == [1, 2, 3, 4]
    assert sample([TURNS[0], tail], cutoff_len=7)[0] == [1, 2, 3, 4, 50, 51, 52]
    silent = Turn([50, 51, 52], [])
    for eos, closing in ((None, []), (EOS, [EOS])):
        assert sample([TURNS[0], silent, TURNS[1]], eos=eos, cutoff_len=6)[0] == [1, 2, 3, 4, *closing]
    # A short turn behind one that does not fit answers a conversation that is not there.
    assert sample([TURNS[0], Turn(list(range(20, 30)), [31]), TURNS[1]], cutoff_len=9)[0] == [1, 2, 3, 4]


def test_mask_history_needs_all_turns():
    assert sample(mask_history=True, cutoff_len=7) == ([1, 2, 3, 4, 5, 6, 7], [N, N, N, N, N, N, 7])
    with pytest.raises(UnusableRecord, match=NO_ROOM):
        sample(mask_history=True, cutoff_len=6)


@pytest.mark.parametrize("mask_history", [False, True])
def test_an_empty_last_reply_is_the_last(mask_history):
    """It is trained as its end mark; no reply of the history takes its place."""
    turns = [TURNS[0], Turn([5, 6], [])]
    history = [N, N, N, N] if mask_history else [N, N, 3, 4]
    ended = [N, N, N, N, N] if mask_history else [N, N, 3, 4, EOS]
    assert sample(turns, eos=EOS, mask_history=mask_history) == ([1, 2, 3, 4, 5, 6, EOS], [*ended, N, EOS])
    assert sample(turns, eod_id=EOS, mask_history=mask_history)[1] == [*history, N, N, EOS]
    # With nothing that ends it, there is nothing to train on.
    if mask_history:
        with pytest.raises(UnusableRecord, match=NO_TARGET):
            sample(turns, mask_history=True)
    else:
        assert sample(turns)[1] == [*history, N, N]


def test_an_empty_reply_in_the_middle_gets_its_end_label():
    turns = [Turn([1, 2], []), TURNS[1]]
    assert sample(turns, eos=EOS) == ([1, 2, 5, 6, 7, 8, EOS], [N, N, EOS, N, 7, 8, EOS])
    assert sample(turns, eos=EOS, cutoff_len=4) == ([1, 2, EOS], [N, N, EOS])
    assert sample([replace(turns[0], train=False), TURNS[1]], eos=EOS)[1] == [N, N, N, N, 7, 8, EOS]


def test_no_end_behind_a_last_reply_without_loss():
    turns = [TURNS[0], replace(TURNS[1], train=False)]
    assert sample(turns, eod_id=EOS)[1] == [N, N, 3, 4, N, N, N, N, N]
    assert sample(turns, eos=EOS)[1] == [N, N, 3, 4, EOS, N, N, N, N]
    assert sample([*TURNS, Turn([9], [], has_reply=False)], eod_id=EOS)[1][-2:] == [N, EOS]


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


@pytest.mark.parametrize("cutoff_len", range(7, 13))
@pytest.mark.parametrize("eod_id", [None, 98])
@pytest.mark.parametrize("eos", [None, EOS])
def test_cutting_leaves_both_sides_the_whole_prompt(cutoff_len, eod_id, eos):
    closing = (eod_id is not None) + (eos is not None)
    if cutoff_len <= 6 + closing:
        with pytest.raises(UnusableRecord, match=NO_ROOM):
            pair(TURNS, LONG, eos, cutoff_len=cutoff_len, eod_id=eod_id)
        return
    sides = pair(TURNS, LONG, eos, cutoff_len=cutoff_len, eod_id=eod_id)
    for (ids, labels), turns in zip(sides, (TURNS, LONG), strict=True):
        assert ids[:6] == [1, 2, 3, 4, 5, 6] and labels[:6] == [N] * 6
        reply = turns[1].target[: cutoff_len - 6 - closing]
        ends = [token for token in (eos, eod_id) if token is not None]
        is_whole = reply == turns[1].target
        assert ids[6:] == [*reply, *ends] and labels[6:] == [*reply, *(ends if is_whole else [N] * closing)]


def test_a_pair_without_room_or_target_on_one_side_is_unusable():
    with pytest.raises(UnusableRecord, match=NO_ROOM):
        pair(TURNS, [TURNS[0], Turn([5, 6, 7, 8, 9, 10], [9])], cutoff_len=8)
    silent = [TURNS[0], Turn([5, 6], [])]
    with pytest.raises(UnusableRecord, match=NO_TARGET):
        pair(TURNS, silent)
    assert pair(TURNS, silent, EOS)[1] == ([1, 2, 3, 4, 5, 6, EOS], [N, N, N, N, N, N, EOS])


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


# One number for each token, so that it is known where every token comes from; ends are above them.
TURN_LENGTHS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0, 0, 1, 2, 5, 9]), st.booleans()), min_size=1, max_size=5
)
CLOSING = st.sampled_from([(None, None), (900, None), (None, 800), (900, 800), (900, 900)])


def _numbered(lengths):
    turns, number = [], 1
    for source, target, train in lengths:
        turns.append(
            Turn(list(range(number, number + source)), list(range(number + source, number + source + target)), train)
        )
        number += source + target
    return turns


def _check_sample(turns, cutoff_len, closing, mask_history):
    """What every sample is, by the rules alone: a beginning of the conversation, cut in a reply or between turns."""
    eos, eod = closing
    options = SampleOptions(cutoff_len, mask_history=mask_history, eod_id=eod)
    whole = [token for turn in turns for token in turn.source + turn.target]
    try:
        ids, labels = (array.tolist() for array in build_sample(turns, options, eos))
    except UnusableRecord:
        trained = turns[-1:] if mask_history else turns
        needed = len(turns[0].source) if not mask_history else len(whole) - len(turns[-1].target)
        ends = len({eos, eod} - {None})
        is_first_trained = bool(trained[0].target) and trained[0].train
        assert not is_first_trained or needed + ends >= cutoff_len
        return
    kept = [token for token in ids if token < 800]
    ends = ids[len(kept) :]
    assert len(ids) <= cutoff_len
    assert kept == whole[: len(kept)], "a beginning, in order"
    assert ends == list(dict.fromkeys(token for token in closing if token is not None))
    position = 0
    cut_at = len(kept)
    for index, turn in enumerate(turns):
        start, stop = position + len(turn.source), position + len(turn.source) + len(turn.target)
        assert cut_at >= start + bool(turn.target) or cut_at <= position, "a prompt is whole, with some of its reply"
        carries = turn.train and (not mask_history or index == len(turns) - 1)
        kept_target = turn.target[: max(cut_at - start, 0)]
        assert labels[start : start + len(kept_target)] == (kept_target if carries else [N] * len(kept_target))
        is_kept = cut_at >= stop and cut_at > position
        is_last = cut_at == stop
        if is_kept and eos is not None:
            assert labels[stop] == (eos if carries else N)
        if is_kept and is_last and eod is not None:
            assert labels[-1] == (eod if carries else N)
        if position < cut_at < stop:
            assert labels[cut_at:] == [N] * len(ends)
            assert len(ids) == cutoff_len, "no token less than there is room for"
        position = stop
    sources = [index for index, token in enumerate(kept) if any(token in turn.source for turn in turns)]
    assert all(labels[index] in (N, eos) for index in sources)
    assert fits(turns, options, eos) == (kept == whole)


@settings(max_examples=400, deadline=None)
@given(lengths=TURN_LENGTHS, cutoff_len=st.integers(2, 60), closing=CLOSING, mask_history=st.booleans())
def test_samples_of_random_turns(lengths, cutoff_len, closing, mask_history):
    _check_sample(_numbered(lengths), cutoff_len, closing, mask_history)


def _prompt_cut(monkeypatch):
    """The rule of LLaMA-Factory: a long prompt loses its end, and the reply stays."""
    original = samples._kept

    def kept(turns, options, eos):
        found = original(turns, options, eos)
        if len(found) < len(turns):
            turn = turns[len(found)]
            found.append((Turn(turn.source[:1], turn.target[:1], turn.train), False))
        return found

    monkeypatch.setattr(samples, "_kept", kept)


def _end_of_a_cut_reply_taught(monkeypatch):
    original = samples._kept
    monkeypatch.setattr(samples, "_kept", lambda *given: [(turn, True) for turn, _ in original(*given)])


def _too_long(monkeypatch):
    original = samples._kept

    def kept(turns, options, eos):
        return original(turns, replace(options, cutoff_len=options.cutoff_len + 1), eos)

    monkeypatch.setattr(samples, "_kept", kept)


def _too_short(monkeypatch):
    original = samples._kept

    def kept(turns, options, eos):
        return original(turns, replace(options, cutoff_len=options.cutoff_len - 1), eos)

    monkeypatch.setattr(samples, "_kept", kept)


def _last_is_the_last_with_a_target(monkeypatch):
    original = samples._trained

    def trained(turns, options):
        return original([replace(turn, has_reply=bool(turn.target)) for turn in turns], options)

    monkeypatch.setattr(samples, "_trained", trained)


def _ends_always_taught(monkeypatch):
    original = samples._joined

    def joined(*arguments):
        ids, labels, has_target = original(*arguments)
        return ids, [token if token >= 800 else label for token, label in zip(ids, labels, strict=True)], has_target

    monkeypatch.setattr(samples, "_joined", joined)


@pytest.mark.parametrize(
    "fault",
    [_prompt_cut, _end_of_a_cut_reply_taught, _too_long, _too_short, _last_is_the_last_with_a_target,
     _ends_always_taught],
)  # fmt: skip
def test_faults_are_found(monkeypatch, fault):
    cases = [
        (lengths, cutoff_len, closing, mask_history)
        for lengths in ([(3, 4, True), (2, 5, True)], [(3, 4, True), (2, 3, False)], [(3, 4, True), (2, 0, True)])
        for cutoff_len in (5, 8, 11, 13)
        for closing in ((None, None), (900, None), (None, 800))
        for mask_history in (False, True)
    ]

    def found():
        for lengths, *rest in cases:
            try:
                _check_sample(_numbered(lengths), *rest)
            except AssertionError:
                return True
        return False

    assert not found()
    fault(monkeypatch)
    assert found()
