"""Conversations that are too long for their last reply lose whole turns from the front, and nothing else."""

import pytest

from mindspeed_llm.tasks.preprocess import conversation_work
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.shortening import shortened
from tests.support.tokenizers import CHATML_TEMPLATE
from tests.tasks.preprocess.pieces import IGNORED, bpe_tokenizer, run, sequences

HANDLER = "OpenAIInstructionHandler"


def _conversation(*roles):
    return Conversation([Message(role, f"{role}{index}") for index, role in enumerate(roles)], system="S", tools="T")


def _texts(conversation):
    return [message.content for message in conversation.messages]


@pytest.mark.parametrize("num_turns", [1, 2, 3, 7, 20])
def test_as_few_turns_as_fits_are_left_out(num_turns):
    whole = _conversation(*["user", "assistant"] * num_turns)
    for room in range(2 * num_turns + 1):
        calls = []

        def render(some, calls=calls):
            calls.append(some)
            return some

        def fits(some, room=room):
            return len(some.messages) <= room

        found = shortened(whole, whole, render, fits)
        assert _texts(found) == _texts(whole)[-max(2, room // 2 * 2) :]
        assert (found.system, found.tools) == ("S", "T")
        # One rendering, the given one, where it fits; no more than a few where it does not.
        assert len(calls) <= (0 if room >= 2 * num_turns else num_turns.bit_length())


def test_results_stay_with_their_calls():
    whole = _conversation(
        "user", "assistant", "user", "function", "observation", "observation", "function", "observation", "assistant"
    )
    for room in (1, 6, 8):
        found = shortened(whole, whole, lambda some: some, lambda some, room=room: len(some.messages) <= room)
        assert _texts(found) == _texts(whole)[2:]
    # The same where a record gives them as the user's text.
    tagged = [
        *(Message(role, "x") for role in ("user", "assistant", "user", "assistant")),
        Message("user", "<tool_response>1</tool_response>"), Message("assistant", "y"),
    ]  # fmt: skip
    found = shortened(Conversation(tagged), Conversation(tagged), lambda some: some, lambda some: False)
    assert found.messages == tagged[2:]


def _record(num_turns, system="Be brief."):
    messages = [{"role": "system", "content": system}]
    for turn in range(num_turns):
        messages += [{"role": "user", "content": f"question {turn}"}, {"role": "assistant", "content": f"reply {turn}"}]
    return {"messages": messages}


def _without(record, num_turns):
    system, *rest = record["messages"]
    return {"messages": [system, *rest[2 * num_turns :]]}


def _run(record, template, **options):
    tokenizer = bpe_tokenizer(chat_template=CHATML_TEMPLATE)
    return run(HANDLER, tokenizer, record, prompt_type=template, mask_history=True, **options)


def _check_mask_history(template):
    """Each length gives what the conversation gives without its earliest turns, unlimited."""
    record = _record(5)
    samples = [
        [sequences(_run(_without(record, left_out), template), key)[0] for key in ("input_ids", "labels")]
        for left_out in range(5)
    ]
    lengths = [len(ids) for ids, _ in samples]
    assert lengths == sorted(set(lengths), reverse=True)
    # Under baichuan2 a cut reply makes room for the eos token behind it: whole ones only here.
    for length in range(lengths[-1] - (template != "baichuan2"), lengths[0] + 2):
        chunk = _run(record, template, seq_length=length)
        ids, labels = next((s for s in samples if len(s[0]) <= length), [part[:length] for part in samples[-1]])
        if set(labels) == {IGNORED}:
            assert len(chunk.skipped) == 1
            continue
        assert sequences(chunk, "input_ids") == [ids]
        assert sequences(chunk, "labels") == [labels]


@pytest.mark.parametrize("template", ["llama3", "qwen3", "baichuan2", None], ids=str)
def test_mask_history_keeps_what_begins_a_conversation(template):
    """BOS, system text; also under the tokenizer's own template (None)."""
    _check_mask_history(template)


def test_a_lost_beginning_is_found(monkeypatch):
    def cut_tokens(conversation, rendered, render, fits):
        while len(rendered) > 1 and not fits(rendered):
            rendered = rendered[1:]
        return rendered

    monkeypatch.setattr(conversation_work, "shortened", cut_tokens)
    with pytest.raises(AssertionError):
        _check_mask_history("llama3")


def test_the_last_reply_is_cut_where_it_does_not_fit_alone():
    record = _record(2)
    record["messages"][-1]["content"] = "word " * 50
    alone = _run(_without(record, 1), "llama3")
    (ids,), (labels,) = sequences(alone, "input_ids"), sequences(alone, "labels")
    first = next(index for index, label in enumerate(labels) if label != IGNORED)
    chunk = _run(record, "llama3", seq_length=first + 1)
    assert sequences(chunk, "input_ids") == [ids[: first + 1]]
    assert sequences(chunk, "labels") == [[*[IGNORED] * first, ids[first]]]
    assert _run(record, "llama3", seq_length=first).skipped[0][0].startswith("prompt fills")


def test_a_result_without_its_call_never_begins_a_conversation():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    record = {
        "messages": [
            {"role": "user", "content": "early " * 30}, {"role": "assistant", "content": "a"},
            {"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "1"}, {"role": "assistant", "content": "done"},
        ]
    }  # fmt: skip
    tokenizer = bpe_tokenizer()
    late = run(HANDLER, tokenizer, {"messages": record["messages"][2:]}, prompt_type="qwen", mask_history=True)
    length = len(late.arrays["input_ids"])
    for missing in (0, 2):
        chunk = run(HANDLER, tokenizer, record, prompt_type="qwen", mask_history=True, seq_length=length - missing)
        assert chunk.arrays["input_ids"].tolist() == late.arrays["input_ids"].tolist()[: length - missing]
