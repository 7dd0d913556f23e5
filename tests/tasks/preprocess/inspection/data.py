"""Small data sets for the tests, written as the preprocessing command writes them, and readings of what is shown."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from tests.support.tokenizers import chatml_tokenizer

N = -100
TOKENIZER = chatml_tokenizer(pad_token="<pad>")
EOS, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id

CHAT = [
    ("<|im_start|>user\nWho? 😀 ⟦a⟧<|im_end|>\n<|im_start|>assistant\n", False),
    ("\tthe family 👨‍👩‍👧\nof\r\n中文<|im_end|>", True),
    ("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n", False),
    (" é\u200b!<|im_end|>", True),
    ("\n", False),
]


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def sample_of(parts: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """(ids, labels) of parts of text that carry loss or do not."""
    ids, labels = [], []
    for text, trained in parts:
        part = ids_of(text)
        ids += part
        labels += part if trained else [N] * len(part)
    return ids, labels


def write(prefix: Path, **columns: list[list[int]]) -> Path:
    """Write the files of samples; returns the prefix."""
    for key, sequences in columns.items():
        write_file(Path(f"{prefix}_packed_{key}_document"), sequences)
    return prefix


def write_file(prefix: Path, sequences: list[list[int]], **options) -> Path:
    with IndexedWriter(prefix) as writer:
        flat = np.array([token for sequence in sequences for token in sequence], dtype=np.int32)
        writer.add_many(flat, [len(sequence) for sequence in sequences], **options)
    return prefix


def write_chats(prefix: Path, *chats: list[tuple[str, bool]]) -> Path:
    samples = [sample_of(chat) for chat in chats]
    return write(prefix, input_ids=[ids for ids, _ in samples], labels=[labels for _, labels in samples])


def write_summary(prefix: Path, **content) -> None:
    Path(f"{prefix}_summary.json").write_text(json.dumps(content), encoding="utf-8")


def marked(text: str) -> list[str]:
    """Texts between plain marks, without the signs for characters that cannot be seen."""
    return [without_signs(run) for run in re.findall("⟦(.*?)⟧", text, re.DOTALL)]


def without_signs(text: str) -> str:
    return text.replace("↵", "").replace("⇥", "").replace("\\u200b", "\u200b").replace("\\r", "\r")


def trained_texts(parts: list[tuple[str, bool]]) -> list[str]:
    return [text.replace("⟦", "\\u27e6").replace("⟧", "\\u27e7") for text, trained in parts if trained]


class Page(HTMLParser):
    """What a page says: for each element `.tokens` its tokens {place: (state, id)}, and its text without signs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.streams: list[dict[int, tuple[str, list[int]]]] = []
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.remarks: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        values = dict(attrs)
        kind = values.get("class") or ""
        if tag != "meta":
            self._open.append((tag, kind))
        if kind == "tokens":
            self.streams.append({})
            self.texts.append("")
        if "data-tip" in values:
            first, second = values["data-tip"].split("\n") if "\n" in values["data-tip"] else (values["data-tip"], "")
            places, ids = first.split(": ")
            start, *stop = map(int, re.findall(r"\d+", places))
            numbers = list(map(int, re.findall(r"-?\d+", ids)))
            assert start + len(numbers) - 1 == (stop[0] if stop else start)
            mark = next((kind or "loss" for tag, kind in self._open if tag == "mark"), "none")
            wanted = {"none": "no loss", "loss": "carries loss", "other": "to be predicted here"}[mark]
            assert second.startswith(wanted) or not second
            for offset, number in enumerate(numbers):
                self.streams[-1][start + offset] = (mark, number)

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        kinds = [kind for _, kind in self._open]
        tags = [tag for tag, _ in self._open]
        if "script" in tags:
            self.scripts.append(data)
        if any(kind.split()[:1] == ["t"] for kind in kinds) and "i" not in tags:
            self.texts[-1] += data
        if set(kinds) & {"left-out", "part", "padding"}:
            self.remarks.append(data)
