"""The page against the labels, token by token, and against data that tries to act in it."""

import base64
import hashlib
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.inspection import inspect_prefix, inspecting
from mindspeed_llm.tasks.preprocess.inspection.decoding import Decoder
from mindspeed_llm.tasks.preprocess.inspection.facts import Facts
from mindspeed_llm.tasks.preprocess.inspection.layout import Limits
from mindspeed_llm.tasks.preprocess.inspection.page import page
from mindspeed_llm.tasks.preprocess.inspection.streams import Sample, Stream, labelled_stream, prompt_stream
from tests.tasks.preprocess.inspection.data import (
    CHAT,
    EOS,
    PAD,
    TOKENIZER,
    N,
    Page,
    ids_of,
    sample_of,
    write,
    write_chats,
    write_summary,
)

ATTACK = "</span><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='alert(3)' &lt; &amp; <!-- ]]>"


def page_of(*streams: Stream, limits: Limits | None = None, **facts) -> Page:
    title, kind = facts.pop("title", "data"), facts.pop("kind", "instruction")
    sample = Sample(0, streams)
    return Page("".join(page(Facts(title, kind, **facts), [sample], 1, Decoder(TOKENIZER), limits)))


def states(ids, labels) -> dict[int, tuple[str, int]]:
    """What a page has to say of each token."""
    expected = {}
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        state = "none" if label == N or place == 0 else "loss" if label == token else "other"
        expected[place] = (state, token)
    return expected


def labelled(ids, labels, title="") -> Stream:
    return labelled_stream(title, np.array(ids), np.array(labels))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=9), st.sampled_from([0, 1, 2])), min_size=1, max_size=6))
def test_the_marked_tokens_are_those_with_labels(parts):
    ids, labels = [], []
    for text, kind in parts:
        part = ids_of(text)
        ids += part
        labels += [[N] * len(part), part, [EOS] * len(part)][kind]
    assert page_of(labelled(ids, labels)).streams == [states(ids, labels)]


def test_a_mask_that_is_shifted_by_one_is_seen(monkeypatch):
    ids, labels = sample_of(CHAT)
    original = Stream.states.func
    monkeypatch.setattr(Stream, "states", property(lambda self: np.roll(original(self), 1)))
    assert page_of(labelled(ids, labels)).streams != [states(ids, labels)]


def test_the_text_can_be_copied():
    shown = page_of(labelled(*sample_of(CHAT)))
    assert shown.texts == ["".join(text for text, _ in CHAT).replace("\u200b", "").replace("\r", "")]


def test_data_cannot_act(tmp_path):
    ids, labels = sample_of([(ATTACK, False), (ATTACK, True)])
    shown = page_of(
        labelled(ids, labels, title=ATTACK),
        title=ATTACK,
        kind=ATTACK,
        rows=[(ATTACK, ATTACK)],
        skipped=[(ATTACK, 1, ATTACK)],
        lengths=[(ATTACK, 1)],
        warnings=[ATTACK],
    )
    assert shown.texts == [ATTACK * 2]
    assert shown.tags.count("script") == 1 and "img" not in shown.tags
    names = {name for name, _ in shown.attributes}
    assert not any(name.startswith("on") for name in names) and "src" not in names
    # Only the script of the page may run, and nothing is fetched.
    policy = next(value for name, value in shown.attributes if name == "content" and "default-src" in value)
    (script,) = shown.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert all(value.startswith("#") for name, value in shown.attributes if name == "href")


def test_samples_can_be_reached(tmp_path):
    write_chats(tmp_path / "a", CHAT, CHAT, CHAT)
    inspect_prefix(tmp_path / "a", num=2, html=tmp_path / "deep" / "page.html", tokenizer=TOKENIZER)
    shown = Page((tmp_path / "deep" / "page.html").read_text(encoding="utf-8"))
    targets = {value for name, value in shown.attributes if name == "id"}
    links = [value for name, value in shown.attributes if name == "href"]
    assert targets == {"s0", "s1", "tip"}
    assert links == ["#s0", "#s1", "#s1", "#s0"]
    assert shown.streams == [states(*sample_of(CHAT))] * 2


def test_what_is_left_out_is_counted():
    ids = ids_of("x" * 30 + "y" * 300)
    labels = [N] * 30 + ids[30:]
    shown = page_of(labelled(ids, labels), limits=Limits(total=200, head=40, tail=20))
    expected = states(ids, labels)
    assert shown.streams == [{place: expected[place] for place in itertools.chain(range(70), range(310, 330))}]
    assert shown.remarks == ["… 240 tokens with loss left out …"]


def test_packs_prompts_and_nothing():
    ids, mask = [*ids_of("abcd"), PAD, PAD], np.array([1, 1, 2, 2, 0, 0])
    pack = labelled_stream("", np.array(ids), np.array([N, ids[1], N, ids[3], N, N]), mask)
    assert page_of(pack).remarks == ["1 of 2: 2 tokens, 1 with loss", "2 of 2: 2 tokens, 1 with loss",
                                     "padding: 2 × <pad>"]  # fmt: skip
    prompt = page_of(prompt_stream("", np.array(ids_of("ab"))), kind="prompt")
    assert prompt.streams == [{0: ("none", ids_of("a")[0]), 1: ("none", ids_of("b")[0])}]
    assert "mark" not in prompt.tags
    assert page_of(labelled([], [])).remarks == ["(empty)"]


def test_a_label_of_another_token_is_named():
    ids = ids_of("ab")
    html = "".join(
        page(Facts("d", "instruction"), [Sample(0, (labelled(ids, [N, EOS]),))], 1, Decoder(TOKENIZER), None)
    )
    assert re.search(rf"to be predicted here: &lt;/s&gt; \(id {EOS}\)", html)
    assert "<b>⇒&lt;/s&gt;</b></mark>" in html


def test_the_page_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "page.html"
    file.write_text("before")
    write(tmp_path / "a", input_ids=[[1, 2], [3]], labels=[[N, 2], [3, 4]])
    with pytest.raises(UserError, match="sample 1 has 1 ids, but 2 labels"):
        inspect_prefix(tmp_path / "a", html=file, tokenizer=TOKENIZER)
    assert file.read_text() == "before"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    with pytest.raises(UserError, match="is a folder"):
        inspect_prefix(tmp_path / "a", html=tmp_path, tokenizer=TOKENIZER)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        inspect_prefix(tmp_path / "a", html=tmp_path / "file" / "page.html", tokenizer=TOKENIZER)


def test_the_head_says_what_the_summary_says(tmp_path, capsys):
    write_chats(tmp_path / "a", CHAT)
    write_summary(tmp_path / "a", handler="AlpacaStyleInstructionHandler", num_records=3, num_samples=1,
                  skipped={"no <reply>": 2}, first_skipped={"no <reply>": ["f:2", "f:3"]},
                  length_histogram={"65-128": 1})  # fmt: skip
    inspect_prefix(tmp_path / "a", html=tmp_path / "page.html", tokenizer=TOKENIZER)
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<dt>handler</dt><dd>AlpacaStyleInstructionHandler</dd>" in html
    assert "<dt>records</dt><dd>3 read, 2 skipped</dd>" in html
    assert "2 records skipped: no &lt;reply&gt; (first at f:2, f:3)" in html
    assert "<th>65-128</th><td>1</td>" in html
    assert capsys.readouterr().out == f"{tmp_path}/page.html: 1 of 1 samples of {tmp_path}/a\n"


def test_shortening_can_be_switched_off(tmp_path):
    long = [("q", False), ("r" * (inspecting.PAGE_LIMITS.run + 50), True)]
    write_chats(tmp_path / "a", long)
    for shorten, shown in ((True, inspecting.PAGE_LIMITS.run - 16 + 1), (False, inspecting.PAGE_LIMITS.run + 51)):
        inspect_prefix(tmp_path / "a", html=tmp_path / "p.html", tokenizer=TOKENIZER, shorten=shorten)
        assert len(Page((tmp_path / "p.html").read_text(encoding="utf-8")).streams[0]) == shown
