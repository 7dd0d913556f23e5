"""What all work on records of conversations has in common: batches to the tokenizer, mistakes to the user."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk, end_to_end
from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import BadConversation, BadRecord, UnusableRecord
from mindspeed_llm.tasks.preprocess.tokenizer_errors import TOKENIZER_ERRORS, not_tokenized

Item = TypeVar("Item")
"""What a record becomes before it is tokenized."""
Rendered = TypeVar("Rendered")
"""The same as token ids."""

ERROR, SKIP = "error", "skip"

Skipped = tuple[str, str]
"""(reason, file:line). Reasons are few, whatever the records hold: what only one record says follows its place."""

UNFIT = "the template cannot express the conversation"
"""The reason for mistakes that only rendering finds, such as a tool that the template leaves out."""

_MESSAGE_LENGTH = 200


class RecordWork(ABC, Generic[Item, Rendered]):
    """Records -> one sample each: read, rendered to token ids (a batch by one call of the tokenizer), built.

    `on_bad_record` says what becomes of a record with a mistake: "error" ends the work naming file, line and key,
    "skip" counts it by the kind of mistake. `on_bad_conversation` says the same of messages in an order that no
    conversation has. Records that are sound but hold nothing to train on are always counted.
    """

    keys: tuple[str, ...]
    label_keys: tuple[str, ...] = ()
    """The keys whose ids, -100 left out, carry loss."""

    def __init__(self, *, on_bad_record: str = ERROR, on_bad_conversation: str = SKIP) -> None:
        self._on_bad_record, self._on_bad_conversation = on_bad_record, on_bad_conversation

    @abstractmethod
    def read(self, record: Record) -> Item:
        """Read a record. Raises UserError or UnusableRecord."""

    @abstractmethod
    def render(self, items: Sequence[Item]) -> list[Rendered]:
        """Turn items into token ids. May raise UserError, or what tokenizers raise, for all where one is wrong."""

    @abstractmethod
    def build(self, item: Item, rendered: Rendered) -> Mapping[str, Any]:
        """The ids of each key. Raises UnusableRecord, or UserError where the record has to be rendered again."""

    def has_empty_reply(self, item: Item) -> bool:
        """Whether a reply has no text; such records are kept and counted."""
        return False

    def is_equal_pair(self, sample: Mapping[str, Any]) -> bool:
        """Whether the sample has two sides that are the same; such are kept and counted."""
        return False

    def __call__(self, records: Sequence[Record]) -> Chunk:
        skipped: dict[int, Skipped] = {}
        samples: list[Mapping[str, Any]] = []
        empty_replies = 0
        for position, item, rendered in self._rendered(records, skipped):
            try:
                samples.append(self.build(item, rendered))
            except (UserError, UnusableRecord) as error:
                skipped[position] = self._skipped(records[position], error)
                continue
            empty_replies += self.has_empty_reply(item)
        arrays = {key: end_to_end([sample[key] for sample in samples]) for key in self.keys}
        lengths = {key: np.array([len(sample[key]) for sample in samples], dtype=np.int32) for key in self.keys}
        return Chunk(
            arrays,
            lengths,
            len(records),
            [skipped[position] for position in sorted(skipped)],
            empty_replies,
            sum(int((arrays[key] >= 0).sum()) for key in self.label_keys),
            equal_pairs=sum(map(self.is_equal_pair, samples)),
        )

    def _rendered(self, records: Sequence[Record], skipped: dict[int, Skipped]) -> list[tuple[int, Item, Rendered]]:
        items: list[tuple[int, Item]] = []
        for position, record in enumerate(records):
            try:
                items.append((position, self.read(record)))
            except (UserError, UnusableRecord) as error:
                skipped[position] = self._skipped(record, error)
        try:
            rendered = self.render([item for _, item in items])
        except TOKENIZER_ERRORS:
            # One by one, to find out which.
            return self._rendered_singly(records, items, skipped)
        return [(position, item, ids) for (position, item), ids in zip(items, rendered, strict=True)]

    def _rendered_singly(
        self, records: Sequence[Record], items: Sequence[tuple[int, Item]], skipped: dict[int, Skipped]
    ) -> list[tuple[int, Item, Rendered]]:
        found = []
        for position, item in items:
            try:
                (ids,) = self.render([item])
            except TOKENIZER_ERRORS as error:
                skipped[position] = self._skipped(records[position], error)
            else:
                found.append((position, item, ids))
        return found

    def _skipped(self, record: Record, error: Exception) -> Skipped:
        """What to count the record by; raises UserError where its mistake is to end the work."""
        if not isinstance(error, UserError | UnusableRecord):
            error = not_tokenized(record, error)
        is_mistake = isinstance(error, UserError | BadConversation)
        allowed = self._on_bad_conversation if isinstance(error, BadConversation) else self._on_bad_record
        if is_mistake and allowed == ERROR:
            if isinstance(error, UserError) and record.where in str(error):
                raise error
            raise UserError(f"{record.where}: {error}") from error
        if isinstance(error, UnusableRecord):
            return error.kind, _place(record, str(error), error.kind)
        if isinstance(error, BadRecord):
            return f"bad record: {error.kind}", record.where
        return f"bad record: {UNFIT}", _place(record, str(error))


def _place(record: Record, message: str, known: str = "") -> str:
    """Where the record is, with what `known` does not say of its mistake."""
    return record.where if message == known else f"{record.where} ({' '.join(message.split())[:_MESSAGE_LENGTH]})"
