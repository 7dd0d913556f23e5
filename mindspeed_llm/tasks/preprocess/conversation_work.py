"""Records of conversations -> token ids and labels."""

from collections.abc import Mapping, Sequence

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk, end_to_end
from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import UnusableRecord, to_conversation
from mindspeed_llm.tasks.preprocess.render import Renderer
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX, SampleOptions, build_sample
from mindspeed_llm.tasks.preprocess.tokenizer_errors import TOKENIZER_ERRORS, not_tokenized


class ConversationWork:
    """Records of conversations -> input_ids and labels, one sample per record."""

    keys: tuple[str, ...] = ("input_ids", "labels")

    def __init__(
        self,
        renderer: Renderer,
        options: SampleOptions,
        formatting: str,
        columns: Mapping[str, str | None],
        tags: Mapping[str, str | None],
    ) -> None:
        self._renderer, self._options = renderer, options
        self._formatting, self._columns, self._tags = formatting, columns, tags

    def sample(self, record: Record) -> tuple[np.ndarray, np.ndarray, bool]:
        """(ids, labels, whether a reply is empty) of one record; raises UnusableRecord, or UserError naming file and
        line.
        """
        try:
            conversation = to_conversation(record, self._formatting, self._columns, self._tags)
            turns = self._renderer.turns(conversation)
        except UserError as error:
            raise error if record.where in str(error) else UserError(f"{record.where}: {error}") from error
        except TOKENIZER_ERRORS as error:
            raise not_tokenized(record, error) from error
        is_empty = any(message.role == "assistant" and not message.content.strip() for message in conversation.messages)
        return *build_sample(turns, self._options, self._renderer.efficient_eos_id), is_empty

    def __call__(self, records: Sequence[Record]) -> Chunk:
        ids, labels, skipped, empty_replies = [], [], [], 0
        for record in records:
            try:
                sample = self.sample(record)
            except UnusableRecord as reason:
                skipped.append((str(reason), record.where))
                continue
            ids.append(sample[0])
            labels.append(sample[1])
            empty_replies += sample[2]
        arrays = {"input_ids": end_to_end(ids), "labels": end_to_end(labels)}
        lengths = np.array([len(item) for item in ids], dtype=np.int32)
        num_targets = int((arrays["labels"] != IGNORE_INDEX).sum())
        return Chunk(arrays, dict.fromkeys(self.keys, lengths), len(records), skipped, empty_replies, num_targets)
