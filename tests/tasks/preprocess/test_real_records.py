"""Real data sets, where they lie beside the checkout: every record becomes a sample, and its text comes back."""

import json
from pathlib import Path

import pytest

from mindspeed_llm.tasks.preprocess.handlers import WorkOptions, find_handler, make_work
from mindspeed_llm.tasks.preprocess.readers import iterate_records
from tests.tasks.preprocess.pieces import IGNORED, R, bpe_tokenizer, sequences, spelled

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "sft"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no data beside the checkout")


def _made(file, name):
    tokenizer = bpe_tokenizer()
    work = make_work(find_handler(name), tokenizer, WorkOptions(prompt_type="chatml"))
    records = list(iterate_records(DATA / file))
    chunk = work(records)
    assert not chunk.skipped and chunk.num_records == len(records) > 50
    return tokenizer, records, chunk


def _user(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("file", ["alpaca_en_demo.json", "alpaca_zh_demo.json", "identity.json"])
def test_alpaca(file):
    tokenizer, records, chunk = _made(file, "AlpacaStyleInstructionHandler")
    made = zip(sequences(chunk, "input_ids"), sequences(chunk, "labels"), strict=True)
    for (ids, labels), record in list(zip(made, records, strict=True))[::5]:
        question = "\n".join(filter(None, (record.data["instruction"], record.data["input"])))
        expected = spelled(tokenizer, [_user(question), R(record.data["output"]), R("<|im_end|>")])
        assert (ids, labels) == expected


def test_calls_of_tools():
    tokenizer, records, chunk = _made("glaive_toolcall_en_demo.json", "SharegptStyleInstructionHandler")
    num_calls = 0
    for labels, record in zip(sequences(chunk, "labels"), records, strict=True):
        replies = [turn for turn in record.data["conversations"] if turn["from"] in ("gpt", "function_call")]
        expected = ""
        for reply in replies:
            text = reply["value"]
            if reply["from"] == "function_call":
                call = json.loads(text)
                text = f"Action: {call['name']}\nAction Input: {json.dumps(call['arguments'], ensure_ascii=False)}"
                num_calls += 1
            expected += text + "<|im_end|>"
        assert tokenizer.decode([label for label in labels if label != IGNORED]) == expected
    assert num_calls > 100


def test_preference_pairs():
    tokenizer, records, chunk = _made("dpo_en_demo.json", "SharegptStylePairwiseHandler")
    for side in ("chosen", "rejected"):
        made = zip(sequences(chunk, f"{side}_input_ids"), sequences(chunk, f"{side}_labels"), strict=True)
        for (ids, labels), record in zip(made, records, strict=True):
            reply = record.data[side]["value"] + "<|im_end|>"
            assert tokenizer.decode([label for label in labels if label != IGNORED]) == reply
            assert tokenizer.decode(ids).endswith(_user(record.data["conversations"][-1]["value"]) + reply)


def test_messages_with_weights():
    tokenizer, records, chunk = _made("v1_sft_demo.jsonl", "OpenAIInstructionHandler")
    for labels, record in zip(sequences(chunk, "labels"), records, strict=True):
        trained = "".join(
            "".join(part["value"] for part in message["content"]) + "<|im_end|>"
            for message in record.data["messages"]
            if message["role"] == "assistant" and message["loss_weight"]
        )
        assert tokenizer.decode([label for label in labels if label != IGNORED]) == trained
