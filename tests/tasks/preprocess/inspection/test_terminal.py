"""Lines of text: marks, colours and signs, compared with the parts that the samples were made of."""

import io
import re

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.inspection.decoding import Decoder
from mindspeed_llm.tasks.preprocess.inspection.facts import Facts
from mindspeed_llm.tasks.preprocess.inspection.layout import Limits
from mindspeed_llm.tasks.preprocess.inspection.streams import (
    Sample,
    Stream,
    labelled_stream,
    pair_sample,
    prompt_stream,
)
from mindspeed_llm.tasks.preprocess.inspection.terminal import (
    ASCII,
    UNICODE,
    Look,
    facts_lines,
    legend,
    sample_lines,
    stream_text,
)
from tests.tasks.preprocess.inspection.data import (
    CHAT,
    EOS,
    PAD,
    TOKENIZER,
    N,
    ids_of,
    marked,
    sample_of,
    trained_texts,
    without_signs,
)

DECODER = Decoder(TOKENIZER)
PLAIN, COLOUR = Look(), Look(colour=True)
GREEN = re.compile("\x1b\\[32(?:;\\d+)*m(.*?)\x1b\\[0m", re.DOTALL)


def chat(title="") -> Stream:
    ids, labels = sample_of(CHAT)
    return labelled_stream(title, np.array(ids), np.array(labels))


def plain(stream: Stream, look: Look = PLAIN, limits: Limits | None = None) -> str:
    return stream_text(stream, DECODER, look, limits)


def test_marks_stand_around_what_carries_loss():
    shown = plain(chat())
    assert marked(shown) == trained_texts(CHAT)
    whole = "".join(text for text, _ in CHAT).replace("⟦", "\\u27e6").replace("⟧", "\\u27e7")
    assert without_signs(re.sub("[⟦⟧]", "", shown)) == whole.removesuffix("\n")
    assert "⟦⇥\tthe family 👨‍👩‍👧↵\nof\\r↵\n中文<|im_end|>⟧↵\n" in shown


def test_marks_follow_the_mask(monkeypatch):
    original = Stream.states.func
    monkeypatch.setattr(Stream, "states", property(lambda self: np.roll(original(self), 1)))
    assert marked(plain(chat())) != trained_texts(CHAT)


def test_colours_instead_of_marks():
    shown = plain(chat(), COLOUR)
    # Line breaks and tabs stand outside of the colour, between two parts in colour.
    inside = re.sub(GREEN, lambda match: f"⟦{match[1]}⟧", shown)
    inside = re.sub("⟧([\n\t]?)⟦", r"\1", inside)
    plain_text = re.sub("\x1b\\[[\\d;]*m", "", inside)
    assert [without_signs(run) for run in re.findall("⟦([^⟦⟧]*)⟧", plain_text) if run != "a"] == [
        text for text, trained in CHAT if trained
    ]
    assert "⟦a⟧" in re.sub("\x1b\\[[\\d;]*m", "", shown)


def test_ascii_has_marks_of_its_own():
    ids, labels = sample_of([("a {+ b", False), ("c\n+}", True)])
    shown = plain(labelled_stream("", np.array(ids), np.array(labels)), Look(symbols=ASCII))
    assert shown == "a \\x7b\\x2b b{+c\\n\n\\x2b\\x7d+}"


@pytest.mark.parametrize(
    "look, expected",
    [
        (PLAIN, "a⟦b⟧⟦c⇒</s>⟧d"),
        (Look(symbols=ASCII), "a{+b+}{+c=></s>+}d"),
        (COLOUR, "a\x1b[32mb\x1b[0m\x1b[35mc⇒\x1b[0m\x1b[35;4m</s>\x1b[0md"),
    ],
)
def test_another_target_stands_behind_its_token(look, expected):
    ids = ids_of("abcd")
    assert plain(labelled_stream("", np.array(ids), np.array([N, ids[1], EOS, N])), look) == expected


def test_unknown_ids_and_labels():
    ids = np.array([*ids_of("a"), 999, *ids_of("b")])
    assert plain(labelled_stream("", ids, np.array([N, 999, -5]))) == "a⟦⟨id 999⟩⟧⟦b⇒⟨id -5⟩⟧"


def test_a_character_over_two_runs():
    ids = ids_of("a中b")
    labels = [N, N, *ids[2:]]
    assert plain(labelled_stream("", np.array(ids), np.array(labels))) == "a⟨part of 中⟩⟦中b⟧"
    labels = [N, ids[1], EOS, ids[3], N]
    assert plain(labelled_stream("", np.array(ids), np.array(labels))) == "a⟦⟨part of 中⟩⟧⟦⟨part of 中⟩⇒</s>⟧⟦中⟧b"


def test_what_is_left_out_stands_outside_of_marks():
    ids = ids_of("q" * 4 + "r" * 90)
    labels = [N] * 4 + ids[4:]
    shown = plain(labelled_stream("", np.array(ids), np.array(labels)), limits=Limits(total=60, head=20, tail=20))
    assert shown == f"qqqq⟦{'r' * 20}⟧ [… 50 tokens with loss left out …] ⟦{'r' * 20}⟧"


def test_a_pack():
    ids = np.array([*ids_of("ab\ncd"), PAD, PAD])
    labels = np.array([N, N, ids[2], N, ids[4], N, N])
    shown = plain(labelled_stream("", ids, labels, np.array([1, 1, 1, 2, 2, 0, 0])))
    assert shown.splitlines() == [
        "── 1 of 2: 3 tokens, 1 with loss ──", "ab⟦↵", "⟧", "── 2 of 2: 2 tokens, 1 with loss ──", "c⟦d⟧",
        "[padding: 2 x <pad>]",
    ]  # fmt: skip


def test_heads_of_samples():
    lines = list(sample_lines(Sample(4, (chat(),)), DECODER, PLAIN, None))
    ids, labels = sample_of(CHAT)
    targets = sum(label != N for label in labels)
    share = f"{100 * targets / len(ids):.1f}"
    assert lines[0] == f"── sample 4 · {len(ids)} tokens · {targets} targets ({share} %) ──"
    nothing = labelled_stream("", np.array([1, 2]), np.array([N, N]))
    assert list(sample_lines(Sample(0, (nothing,)), DECODER, PLAIN, None))[1] == (
        "[no token carries loss: there is nothing to learn here]"
    )
    prompt = list(sample_lines(Sample(0, (prompt_stream("", np.array(ids_of("ab"))),)), DECODER, PLAIN, None))
    assert prompt == ["── sample 0 · 2 tokens ──", "ab"]
    assert list(sample_lines(Sample(0, (prompt_stream("", np.array([])),)), DECODER, PLAIN, None))[1] == "(empty)"


def test_pairs_stand_under_each_other():
    ids, labels = sample_of([("q", False), ("yes", True)])
    other, other_labels = sample_of([("q", False), ("no", True)])
    pair = pair_sample(
        1,
        labelled_stream("chosen", np.array(ids), np.array(labels)),
        labelled_stream("rejected", np.array(other), np.array(other_labels)),
    )
    assert list(sample_lines(pair, DECODER, PLAIN, None)) == [
        "── sample 1 · chosen · 4 tokens · 3 targets (75.0 %) ──", "[both begin with the same 1 token]", "q⟦yes⟧",
        "── rejected · 3 tokens · 2 targets (66.7 %) ──", "q⟦no⟧",
    ]  # fmt: skip


def test_facts():
    facts = Facts(
        "d/a", "instruction", rows=[("records", "5 read"), ("to", "b\x1b[0m")], skipped=[("no\nreply", 2, "f:1, f:3")],
        lengths=[("1-2", 1000), ("3-4", 1), ("5-8", 0)], warnings=["careful"],
    )  # fmt: skip
    assert list(facts_lines(facts, PLAIN)) == [
        "d/a (instruction)",
        "  warning: careful",
        "  records  5 read",
        "  to       b\\x1b[0m",
        "           2 records skipped: no↵reply (first at f:1, f:3)",
        "  lengths in tokens",
        f"    1-2  1,000  {'█' * 30}",
        "    3-4      1  █",
        "    5-8      0  ",
    ]


def test_legends():
    assert list(legend("instruction", PLAIN)) == [
        "⟦text⟧ carries loss, all else does not", "⟦A⇒B⟧ token A stands here, token B is to be predicted",
    ]  # fmt: skip
    assert next(iter(legend("pairwise", COLOUR))) == "\x1b[32mtext\x1b[0m carries loss"
    assert "first token" in list(legend("pretrain", PLAIN))[1]
    assert list(legend("prompt", PLAIN)) == ["no token carries loss: these are prompts"]


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "kind, encoding, environment, expected",
    [
        (Terminal, "utf-8", {}, Look(True, UNICODE)),
        (Terminal, "utf-8", {"NO_COLOR": ""}, Look(True, UNICODE)),  # no-color.org: only when not empty
        (Terminal, "utf-8", {"NO_COLOR": "1"}, Look(False, UNICODE)),
        (Terminal, "utf-8", {"TERM": "dumb"}, Look(False, UNICODE)),
        (Terminal, "ascii", {"TERM": "xterm"}, Look(True, ASCII)),
        (io.TextIOWrapper, "utf-8", {}, Look(False, UNICODE)),
        (io.TextIOWrapper, "latin-1", {}, Look(False, ASCII)),
    ],
)
def test_looks(kind, encoding, environment, expected):
    assert Look.of(kind(io.BytesIO(), encoding=encoding), environment) == expected
