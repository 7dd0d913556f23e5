"""Random conversations: ids are those of the text, and loss lies on the replies and their end marks, nowhere else.

The samples are spelled out piece by piece and encoded by transformers (tests/tasks/preprocess/pieces.py). Each rule has
faults that the same comparison must find.
"""

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.tasks.preprocess import conversation_work, pairwise_work, samples
from mindspeed_llm.tasks.preprocess.render import Turn
from tests.tasks.preprocess.pieces import IGNORED, SPECIALS, R, bpe_tokenizer, run, sequences, spelled, text_of

tokenizer = functools.cache(bpe_tokenizer)

TEXTS = st.text(max_size=12).filter(lambda text: not any(mark in text for mark in SPECIALS)) | st.sampled_from(
    [
        "hello there",
        "谢谢 🙂",
        " don't ",
        "line\nline\n\n",
        "{{content}} {{idx}}",
        "12345",
        "\u200d",
        "def f(x):\n\treturn",
    ]
)
QUESTIONS = TEXTS.filter(str.strip)
TURNS = st.lists(st.tuples(QUESTIONS, TEXTS), min_size=1, max_size=4)
SYSTEMS = st.just("") | TEXTS.filter(str.strip)

FORMATS = {
    "alpaca": "AlpacaStyle",
    "sharegpt": "SharegptStyle",
    "openai": "OpenAI",
}


def _record(formatting, turns, system):
    """The conversation as a record of the format; the last question stands in two columns of alpaca."""
    if formatting == "alpaca":
        question, answer = turns[-1]
        return {"instruction": question, "output": answer, "history": [list(t) for t in turns[:-1]], "system": system}
    names = ("human", "gpt") if formatting == "sharegpt" else ("user", "assistant")
    keys = ("from", "value") if formatting == "sharegpt" else ("role", "content")
    messages = [dict(zip(keys, pair, strict=True)) for turn in turns for pair in zip(names, turn, strict=True)]
    return {"conversations" if formatting == "sharegpt" else "messages": messages, "system": system}


def _chatml(turns, system, *, only_last=False):
    pieces = [f"<|im_start|>system\n{system}<|im_end|>\n"] if system else []
    for index, (question, answer) in enumerate(turns):
        pieces += ["\n"] if index else []
        pieces.append(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        trained = not only_last or index == len(turns) - 1
        pieces += [R(answer), R("<|im_end|>")] if trained else [answer, "<|im_end|>"]
    return pieces


def _llama3(turns, system, *, only_last=False):
    def block(role, text):
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}"

    pieces = ["<s>", *([block("system", system) + "<|eot_id|>"] if system else [])]
    for index, (question, answer) in enumerate(turns):
        pieces.append(block("user", question) + "<|eot_id|>" + block("assistant", ""))
        trained = not only_last or index == len(turns) - 1
        pieces += [R(answer), R("<|eot_id|>")] if trained else [answer, "<|eot_id|>"]
    return pieces


LAYOUTS = {"chatml": _chatml, "llama3": _llama3}


def _check_conversation(formatting, template, turns, system, mask_history=False):
    chunk = run(
        f"{FORMATS[formatting]}InstructionHandler",
        tokenizer(),
        _record(formatting, turns, system),
        prompt_type=template,
        mask_history=mask_history,
    )
    pieces = LAYOUTS[template](turns, system, only_last=mask_history)
    ids, labels = spelled(tokenizer(), pieces)
    assert sequences(chunk, "input_ids") == [ids]
    assert sequences(chunk, "labels") == [labels]
    assert tokenizer().decode(ids) == text_of(pieces)


@pytest.mark.parametrize("formatting", FORMATS)
@pytest.mark.parametrize("template", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(turns=TURNS, system=SYSTEMS, mask_history=st.booleans())
def test_replies_and_their_end_marks_carry_loss(formatting, template, turns, system, mask_history):
    _check_conversation(formatting, template, turns, system, mask_history)


def _check_pair(formatting, template, turns, rejected, system):
    record = _record(formatting, turns, system)
    replies = {"chosen": turns[-1][1], "rejected": rejected}
    if formatting == "sharegpt":
        record["conversations"].pop()
        record |= {key: {"from": "gpt", "value": reply} for key, reply in replies.items()}
    else:
        del record["output"]
        record |= replies
    chunk = run(f"{FORMATS[formatting]}PairwiseHandler", tokenizer(), record, prompt_type=template)
    for side, reply in replies.items():
        pieces = LAYOUTS[template]([*turns[:-1], (turns[-1][0], reply)], system, only_last=True)
        ids, labels = spelled(tokenizer(), pieces)
        assert sequences(chunk, f"{side}_input_ids") == [ids]
        assert sequences(chunk, f"{side}_labels") == [labels]
        assert tokenizer().decode(ids) == text_of(pieces)


@pytest.mark.parametrize("formatting", ["alpaca", "sharegpt"])
@pytest.mark.parametrize("template", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(turns=TURNS, rejected=TEXTS, system=SYSTEMS)
def test_the_last_replies_of_pairs_carry_loss(formatting, template, turns, rejected, system):
    _check_pair(formatting, template, turns, rejected, system)


@settings(max_examples=60, deadline=None)
@given(turns=TURNS, length=st.integers(4, 120), mask_history=st.booleans(), append_eod=st.booleans())
def test_cut_samples_hold_no_more_and_train_on_replies_only(turns, length, mask_history, append_eod):
    """A cut sample has at most the length that is asked for, a whole one is kept as it is, and what carries loss are
    beginnings of replies.
    """
    options = {"mask_history": mask_history, "append_eod": append_eod}
    record = _record("sharegpt", turns, "")
    whole = run("SharegptStyleInstructionHandler", tokenizer(), record, prompt_type="llama3", **options)
    chunk = run(
        "SharegptStyleInstructionHandler", tokenizer(), record, prompt_type="llama3", seq_length=length, **options
    )
    if not len(chunk.lengths["input_ids"]):
        assert len(chunk.skipped) == 1
        return
    (ids,), (labels,) = sequences(chunk, "input_ids"), sequences(chunk, "labels")
    assert len(ids) == len(labels) <= length
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    if whole.lengths["input_ids"][0] <= length:
        assert ids == sequences(whole, "input_ids")[0]
    runs = (
        tokenizer().decode([label if label != IGNORED else tokenizer().bos_token_id for label in labels]).split("<s>")
    )
    replies = [answer + "<|eot_id|>" for _, answer in turns]
    for found in filter(None, runs):
        # A character of several tokens may be cut in two.
        assert any(reply.startswith(found.rstrip("\ufffd")) for reply in replies)


def _source_trained(monkeypatch):
    monkeypatch.setattr(
        samples, "replace", lambda options, **changes: replace(options, train_on_prompt=True, **changes)
    )
    original = conversation_work.build_sample

    def build(turns, options, eos):
        return original(turns, replace(options, train_on_prompt=True), eos)

    monkeypatch.setattr(conversation_work, "build_sample", build)


def _end_mark_missing(monkeypatch):
    def shorter(turns):
        return [Turn(turn.source, turn.target[:-1], turn.train) for turn in turns]

    single, pair = conversation_work.build_sample, pairwise_work.build_pair
    monkeypatch.setattr(conversation_work, "build_sample", lambda turns, *rest: single(shorter(turns), *rest))
    monkeypatch.setattr(pairwise_work, "build_pair", lambda a, b, *rest: pair(shorter(a), shorter(b), *rest))


def _end_mark_untrained(monkeypatch):
    original = samples._joined

    def joined(*arguments):
        ids, labels, is_whole = original(*arguments)
        return ids, [*labels[:-1], IGNORED], is_whole

    monkeypatch.setattr(samples, "_joined", joined)


def _mask_shifted(monkeypatch):
    original = samples._joined

    def joined(*arguments):
        ids, labels, is_whole = original(*arguments)
        return ids, [IGNORED, *labels[:-1]], is_whole

    monkeypatch.setattr(samples, "_joined", joined)


def _history_lost(monkeypatch):
    single, pair = conversation_work.build_sample, pairwise_work.build_pair
    monkeypatch.setattr(conversation_work, "build_sample", lambda turns, *rest: single(turns[-1:], *rest))
    monkeypatch.setattr(pairwise_work, "build_pair", lambda a, b, *rest: pair(a[-1:], b[-1:], *rest))


def _rejected_is_chosen(monkeypatch):
    original = pairwise_work.build_pair
    monkeypatch.setattr(pairwise_work, "build_pair", lambda chosen, rejected, *rest: original(chosen, chosen, *rest))


def _history_trained(monkeypatch):
    # The options of a pair stay as they are given, without mask_history.
    monkeypatch.setattr(samples, "replace", lambda options, **changes: options)


TURNS_OF_FAULTS = [("hi", "Hello!"), ("谢谢", "不客气 🙂")]
BOTH = ["conversation", "pair"]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        *[(fault, kind) for fault in (_source_trained, _end_mark_missing, _end_mark_untrained) for kind in BOTH],
        *[(fault, kind) for fault in (_mask_shifted, _history_lost) for kind in BOTH],
        (_rejected_is_chosen, "pair"),
        (_history_trained, "pair"),
    ],
)
def test_faults_are_found(monkeypatch, fault, kind):
    def check():
        if kind == "pair":
            _check_pair("alpaca", "chatml", TURNS_OF_FAULTS, "no", "Be brief.")
        else:
            _check_conversation("alpaca", "chatml", TURNS_OF_FAULTS, "Be brief.")

    check()
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()
