"""Records of prompts -> the token ids that a model is asked with, for training by reinforcement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.record_work import RecordWork
from mindspeed_llm.tasks.preprocess.records import (
    Prompt,
    RecordLayout,
    UnusableRecord,
    missing_column,
    to_prompt,
    wrong_type,
)
from mindspeed_llm.tasks.preprocess.render import Renderer
from mindspeed_llm.tasks.preprocess.samples import NO_ROOM

ANSWER_KEY = "labels"
"""The additional key that stands for the record's own answer."""


@dataclass(frozen=True)
class PromptItem:
    """A prompt, with the texts of the additional keys."""

    prompt: Prompt
    texts: Mapping[str, str]


class PromptWork(RecordWork[PromptItem, tuple[list[int], dict[str, list[int]]]]):
    """Records of prompts -> input_ids and an attention_mask of ones, and the plain ids of `additional_keys`.

    An additional key is a column of text, `labels` the answer of the record; nothing is put around them. A prompt that
    leaves no room for an answer within `cutoff_len` tokens is counted and left out, never cut.
    """

    def __init__(
        self,
        renderer: Renderer,
        tokenizer: Any,
        layouts: Sequence[RecordLayout],
        *,
        cutoff_len: int,
        additional_keys: Sequence[str] = (),
        **on_mistakes: str,
    ) -> None:
        super().__init__(**on_mistakes)
        self._renderer, self._tokenizer, self._layouts = renderer, tokenizer, layouts
        self._cutoff_len, self._additional = cutoff_len, tuple(additional_keys)
        self.keys = ("input_ids", "attention_mask", *self._additional)

    def read(self, record: Record) -> PromptItem:
        layout = self._layouts[record.source]
        needs_answer = ANSWER_KEY in self._additional
        prompt = to_prompt(record, layout.formatting, layout.columns, layout.tags, answer_required=needs_answer)
        texts = {}
        for key in self._additional:
            if key == ANSWER_KEY:
                assert prompt.answer is not None
                texts[key] = prompt.answer.preface + prompt.answer.content
            elif key not in record.data:
                raise missing_column(record, "additional", key)
            else:
                texts[key] = record.data[key]
            if not isinstance(texts[key], str):
                raise wrong_type(record, key, "text", texts[key])
            if not texts[key].strip():
                raise UnusableRecord(f"empty text for the key {key!r}")
        return PromptItem(prompt, texts)

    def render(self, items: Sequence[PromptItem]) -> list[tuple[list[int], dict[str, list[int]]]]:
        texts = [text for item in items for text in item.texts.values()]
        encoded = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False) if texts else ())
        return [
            (self._renderer.prompt_ids(item.prompt.prompt), {key: next(encoded) for key in item.texts})
            for item in items
        ]

    def build(self, item: PromptItem, rendered: tuple[list[int], dict[str, list[int]]]) -> Mapping[str, Any]:
        ids, additional = rendered
        if len(ids) >= self._cutoff_len:
            raise UnusableRecord(NO_ROOM)
        return {"input_ids": ids, "attention_mask": np.ones(len(ids), dtype=np.int32), **additional}
