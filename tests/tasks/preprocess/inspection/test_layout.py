"""What is shown of a sequence and what is left out: nothing is lost between the two."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.tasks.preprocess.inspection.decoding import Decoder
from mindspeed_llm.tasks.preprocess.inspection.layout import Gap, Limits, Padding, Run, SegmentStart, lay_out
from mindspeed_llm.tasks.preprocess.inspection.streams import (
    LOSS,
    NO_LOSS,
    OTHER_TARGET,
    Stream,
    labelled_stream,
    loss_profile,
    pair_sample,
    text_stream,
)
from tests.tasks.preprocess.inspection.data import EOS, PAD, TOKENIZER, N, ids_of

DECODER = Decoder(TOKENIZER)
SMALL = Limits(total=100, head=20, tail=20)


def stream(ids, labels, mask=None, **options) -> Stream:
    return labelled_stream("", np.array(ids), np.array(labels), None if mask is None else np.array(mask), **options)


def test_states_by_hand():
    one = stream([1, 2, 3, 4, 5], [1, N, 3, EOS, 5])
    # The first token has a label, and is never predicted all the same.
    assert one.states.tolist() == [NO_LOSS, NO_LOSS, LOSS, OTHER_TARGET, LOSS]
    assert (one.num_targets, one.num_tokens, one.share) == (3, 5, 0.6)


def test_text_carries_loss_behind_its_first_token():
    document = text_stream("", [np.array([7, 8], np.uint16), np.array([9], np.uint16)])
    assert document.states.tolist() == [NO_LOSS, LOSS, LOSS]
    assert document.segments.tolist() == [1, 1, 2]
    assert text_stream("", [np.array([7])]).segments is None
    assert text_stream("", []).num_tokens == 0


@pytest.mark.parametrize(
    "labels, mask, padding_ids, expected",
    [
        ([N, 2, N, N], [1, 1, 0, 0], frozenset(), 2),
        ([N, 2, N, 9], [1, 1, 0, 0], frozenset(), 0),  # a label in the padding is a mistake that must be seen
        ([N, 2, N, N], [1, 1, 1, 1], {9}, 2),
        ([N, 2, N, N], None, None, 2),
        ([N, 2, N, N], None, {8}, 0),
        ([N, 2, 9, N], None, {9}, 0),  # one token may be text
        ([N, N, N, N], [0, 0, 0, 0], frozenset(), 4),
    ],
)
def test_padding(labels, mask, padding_ids, expected):
    assert stream([1, 2, 9, 9], labels, mask, padding_ids=padding_ids).num_padding == expected


def test_items_of_a_pack():
    ids = [*ids_of("ab"), *ids_of("cd"), *ids_of("efg"), PAD, PAD]
    labels = [N, ids[1], N, EOS, N, ids[5], ids[6], N, N]
    items = list(lay_out(stream(ids, labels, [1, 1, 2, 2, 3, 3, 3, 0, 0]), DECODER, SMALL))
    shown = [(item.state, "".join(p.text for p in item.pieces)) if isinstance(item, Run) else item for item in items]
    assert shown == [
        SegmentStart(1, 3, 2, 1), (NO_LOSS, "a"), (LOSS, "b"),
        SegmentStart(2, 3, 2, 1), (NO_LOSS, "c"), (OTHER_TARGET, "d"),
        SegmentStart(3, 3, 3, 2), (NO_LOSS, "e"), (LOSS, "fg"),
        Padding(2, DECODER.token(PAD)),
    ]  # fmt: skip


def test_neighbours_with_other_targets_are_runs_of_their_own():
    items = list(lay_out(stream([1, 2, 3], [N, 5, 6]), DECODER, None))
    assert [(item.state, len(item.pieces)) for item in items] == [(NO_LOSS, 1), (OTHER_TARGET, 1), (OTHER_TARGET, 1)]


def test_long_runs_lose_their_middle_and_keep_their_ends():
    ids = ids_of("p" * 30 + "r" * 100 + "q")
    labels = [N] * 30 + ids[30:130] + [N]
    items = list(lay_out(stream(ids, labels), DECODER, SMALL))
    assert [item if isinstance(item, Gap) else len(item.pieces) for item in items] == [30, 20, Gap(60, 60), 20, 1]
    assert sum(len(item.pieces) for item in lay_out(stream(ids, labels), DECODER, None)) == 131


def test_many_runs_lose_the_middle_of_the_sequence():
    ids = ids_of("ab" * 200)
    labels = [N if i % 2 == 0 else token for i, token in enumerate(ids)]
    mask = [1 + i // 100 for i in range(400)]
    items = list(lay_out(stream(ids, labels, mask), DECODER, SMALL))
    assert [item for item in items if not isinstance(item, Run)] == [
        SegmentStart(1, 4, 100, 50), Gap(300, 150), SegmentStart(4, 4, 100, 50, continued=True),
    ]  # fmt: skip


PIECE = st.tuples(st.text("aé😀\n", min_size=1, max_size=40), st.sampled_from(["none", "loss", "other"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECE, min_size=1, max_size=8), st.booleans(), st.integers(0, 5))
def test_every_token_is_shown_or_counted(pieces, shorten, num_padding):
    ids, labels, mask = [], [], []
    for number, (text, kind) in enumerate(pieces):
        part = ids_of(text)
        ids += part
        labels += {"none": [N] * len(part), "loss": part, "other": [EOS] * len(part)}[kind]
        mask += [1 + number // 2] * len(part)
    one = stream([*ids, *[PAD] * num_padding], [*labels, *[N] * num_padding], [*mask, *[0] * num_padding])
    place = targets = 0
    for item in lay_out(one, DECODER, Limits(total=60, head=20, tail=20) if shorten else None):
        if isinstance(item, Run):
            assert item.pieces[0].start == place
            place = item.pieces[-1].stop
            wanted = [N if position == 0 else label for position, label in enumerate(labels)]
            for piece in item.pieces:
                for position in range(piece.start, piece.stop):
                    loss = wanted[position] != N
                    assert (item.state != NO_LOSS) == loss
                    assert not loss or (item.state == LOSS) == (labels[position] == ids[position])
                    targets += loss
        elif isinstance(item, Gap):
            assert shorten
            place, targets = place + item.num_tokens, targets + item.num_targets
        elif isinstance(item, Padding):
            assert item.num_tokens == num_padding
    assert (place, targets) == (len(ids), one.num_targets)


def test_pairs_and_profiles():
    chosen, rejected = stream([1, 2, 3], [N, N, 3]), stream([1, 2, 4, 5], [N, N, 4, 5])
    assert pair_sample(0, chosen, rejected).common == 2
    assert pair_sample(0, chosen, chosen).common == 3
    assert loss_profile(rejected, 2).tolist() == [0.0, 1.0]
    assert loss_profile(rejected, 100).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert loss_profile(stream([], []), 9).tolist() == []
