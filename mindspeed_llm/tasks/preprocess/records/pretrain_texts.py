"""Records as one text each, for pretraining: text columns, instructions, conversations, questions with answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import alpaca
from mindspeed_llm.tasks.preprocess.records.fields import RecordFields

STACK_OVERFLOW_COLUMNS = {"title": "title", "question": "question_body", "answer": "answer_body"}

# Vicuna's system text, then the prompt of Stanford Alpaca. There is no space between the two.
_ALPACA_HEAD = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions.USER: Below is an instruction that describes a task. Write a response "
    "that appropriately completes the request.\n\n"
)


@dataclass(frozen=True)
class AlpacaText:
    """Instruction, input and output in one fixed prompt; without an input its heading is left out."""

    columns: Mapping[str, str | None]

    def __call__(self, record: Record, key: str) -> str:
        """The text of a record, '' where there is no instruction. Raises BadRecord."""
        fields = RecordFields(record, self.columns, {})
        instruction, query = fields.text("prompt", required=True), fields.text("query")
        if not instruction.strip():
            return ""
        query_part = f"### Input:\n{query}\n\n" if query else ""
        answer = alpaca.reply(fields, "response").content
        return f"{_ALPACA_HEAD}### Instruction:\n{instruction}\n\n{query_part}### Response: ASSISTANT: {answer}"


@dataclass(frozen=True)
class StackOverflowText:
    """Title, question and answer under headings."""

    columns: Mapping[str, str | None]

    def __call__(self, record: Record, key: str) -> str:
        """The text of a record. Raises BadRecord."""
        fields = RecordFields(record, self.columns, {})
        title, question, answer = (fields.text(role, required=True) for role in STACK_OVERFLOW_COLUMNS)
        return f"In python, {title}\n### Question:\n{question}\n### Response:\n{answer}\n"


def conversation_text(record: Record, key: str) -> str:
    """The texts of a list of messages, one after the other: under the key `value`, or `content`. Raises BadRecord."""
    fields = RecordFields(record, {"messages": key}, {})
    return "".join(_turn_text(fields, turn) for turn in fields.items("messages", required=True))


def _turn_text(fields: RecordFields, turn: Any) -> str:
    key = "content" if isinstance(turn, dict) and "value" not in turn else "value"
    return fields.as_text(fields.turn_value(turn, key), key)
