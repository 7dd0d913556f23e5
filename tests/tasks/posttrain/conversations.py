"""Conversations, their samples as transformers renders them, and both on disk in every form that training reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from mindspeed_llm.tasks.preprocess.command.main import main as preprocess
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from tests.support.reference import Sample
from tests.support.tokenizers import chatml_tokenizer

LENGTH = 128
# The part between the marks is what transformers' assistant mask has.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HANDLER = ["--handler-name", "AlpacaStyleInstructionHandler"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with a chat template whose replies are marked."""
    return chatml_tokenizer(pad_token="<pad>", chat_template=TEMPLATE)


def make_records(count: int, *, seed: int = 0, turns: int = 1) -> list[dict[str, Any]]:
    """Alpaca records of random letters; every third of them has `turns` - 1 earlier turns."""
    source = random.Random(seed)

    def text(longest: int) -> str:
        return "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(1, longest)))

    return [
        {
            "instruction": f"{number} {text(6)}",
            "input": "",
            "output": text(14),
            "history": [[text(3), text(5)] for _ in range(turns - 1)] if number % 3 == 0 else [],
        }
        for number in range(count)
    ]


def rendered(record: dict[str, Any]) -> Sample:
    """(ids, labels) of a record, by transformers alone."""
    messages = []
    for question, answer in [*record["history"], [record["instruction"], record["output"]]]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    found = make_tokenizer().apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    labels = [token if trained else -100 for token, trained in zip(*map(found.get, KEYS), strict=True)]
    return list(found["input_ids"]), labels


KEYS = ("input_ids", "assistant_masks")


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def prepare(file: Path, tokenizer: Path, prefix: Path, *flags: str) -> Path:
    """Run `preprocess_data.py`; the prefix."""
    words = ["--input", str(file), "--tokenizer-name-or-path", str(tokenizer), "--output-prefix", str(prefix)]
    assert preprocess([*words, *HANDLER, "--seq-length", str(LENGTH), *flags]) == 0
    return prefix


def samples_in_rows(prefix: Path, samples: list[Sample]) -> list[list[Sample]]:
    """Which of the samples stand in each row of packed data, found by their ids."""
    reader = IndexedReader(f"{prefix}_packed_input_ids_document")
    rows = []
    for number in range(len(reader)):
        ids, place, found = reader[number].tolist(), 0, []
        while match := [item for item in samples if ids[place : place + len(item[0])] == item[0]]:
            # Of two of which one begins as the other does, the longer.
            found.append(max(match, key=lambda item: len(item[0])))
            place += len(found[-1][0])
        assert set(ids[place:]) <= {make_tokenizer().pad_token_id}
        rows.append(found)
    return rows
