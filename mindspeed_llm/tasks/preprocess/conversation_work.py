"""Records of conversations -> token ids and labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.record_work import RecordWork
from mindspeed_llm.tasks.preprocess.records import Conversation, RecordLayout, to_conversation
from mindspeed_llm.tasks.preprocess.render import Renderer, Turn
from mindspeed_llm.tasks.preprocess.samples import SampleOptions, build_sample, fits
from mindspeed_llm.tasks.preprocess.shortening import shortened


class ConversationWork(RecordWork[Conversation, list[Turn]]):
    """Records of conversations -> input_ids and labels, one sample per record; with an attention_mask of ones between
    them where it is asked for.

    A conversation that is too long loses its end, with mask_history its earliest turns (`shortened`).
    `layouts` are those of the data sets, by the number of a record's source.
    """

    keys: tuple[str, ...] = ("input_ids", "labels")
    label_keys = ("labels",)

    def __init__(
        self,
        renderer: Renderer,
        options: SampleOptions,
        layouts: Sequence[RecordLayout],
        *,
        attention_mask: bool = False,
        **on_mistakes: str,
    ) -> None:
        super().__init__(**on_mistakes)
        self._renderer, self._options, self._layouts = renderer, options, layouts
        self.runs_in_threads = renderer.runs_in_threads
        if attention_mask:
            self.keys = ("input_ids", "attention_mask", "labels")

    def read(self, record: Record) -> Conversation:
        layout = self._layouts[record.source]
        return to_conversation(record, layout.formatting, layout.columns, layout.tags)

    def render(self, items: Sequence[Conversation]) -> list[list[Turn]]:
        return self._renderer.turns_batch(items)

    def build(self, item: Conversation, rendered: list[Turn]) -> Mapping[str, Any]:
        renderer, options = self._renderer, self._options
        if options.mask_history:
            rendered = shortened(
                item, rendered, renderer.turns, lambda turns: fits(turns, options, renderer.efficient_eos_id)
            )
        ids, labels = build_sample(rendered, options, renderer.efficient_eos_id)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}

    def has_empty_reply(self, item: Conversation) -> bool:
        return any(message.role == "assistant" and not message.content.strip() for message in item.messages)
