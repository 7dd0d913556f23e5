"""Records with a chosen and a rejected reply -> token ids and labels of both."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.record_work import RecordWork
from mindspeed_llm.tasks.preprocess.records import Conversation, Preference, RecordLayout, to_preference
from mindspeed_llm.tasks.preprocess.render import Renderer, Turn
from mindspeed_llm.tasks.preprocess.samples import SampleOptions, build_pair, fits
from mindspeed_llm.tasks.preprocess.shortening import shortened

PAIRWISE_KEYS = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")


class PairwiseWork(RecordWork[Preference, tuple[list[Turn], list[Turn]]]):
    """Records of preference pairs -> the four `PAIRWISE_KEYS`, one sample per record.

    Only the chosen and the rejected reply carry loss, whatever replies the prompt holds. Both sides have the same
    prompt: where either is too long, both lose their earliest turns (`shortened`).
    """

    keys: tuple[str, ...] = PAIRWISE_KEYS
    label_keys = ("chosen_labels", "rejected_labels")

    def __init__(
        self, renderer: Renderer, options: SampleOptions, layouts: Sequence[RecordLayout], **on_mistakes: str
    ) -> None:
        super().__init__(**on_mistakes)
        self._renderer, self._options, self._layouts = renderer, options, layouts

    def read(self, record: Record) -> Preference:
        layout = self._layouts[record.source]
        return to_preference(record, layout.formatting, layout.columns, layout.tags)

    def render(self, items: Sequence[Preference]) -> list[tuple[list[Turn], list[Turn]]]:
        return [self._renderer.pair_turns(item.prompt, item.chosen, item.rejected) for item in items]

    def build(self, item: Preference, rendered: tuple[list[Turn], list[Turn]]) -> Mapping[str, Any]:
        renderer, options = self._renderer, self._options

        def render(prompt: Conversation) -> tuple[list[Turn], list[Turn]]:
            return renderer.pair_turns(prompt, item.chosen, item.rejected)

        def both_fit(sides: tuple[list[Turn], list[Turn]]) -> bool:
            return all(fits(turns, options, renderer.efficient_eos_id) for turns in sides)

        samples = build_pair(*shortened(item.prompt, rendered, render, both_fit), options, renderer.efficient_eos_id)
        return dict(zip(self.keys, (array for sample in samples for array in sample), strict=True))

    def has_empty_reply(self, item: Preference) -> bool:
        return any(reply.role == "assistant" and not reply.content.strip() for reply in (item.chosen, item.rejected))

    def is_equal_pair(self, sample: Mapping[str, Any]) -> bool:
        return np.array_equal(sample["chosen_input_ids"], sample["rejected_input_ids"])
