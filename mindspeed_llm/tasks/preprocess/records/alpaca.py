"""Alpaca records: instruction, input and output, with earlier turns in a column of pairs."""

from mindspeed_llm.tasks.preprocess.records.conversation import Conversation, Message
from mindspeed_llm.tasks.preprocess.records.fields import RecordFields

COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
}


def prompt(fields: RecordFields) -> Conversation:
    """Everything before the reply; instruction and input stand one under the other, an empty one is left out."""
    messages = []
    for pair in fields.items("history"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise fields.wrong_type(fields.column("history"), "pairs [question, answer]", pair)
        question, answer = (fields.as_text(text, fields.column("history")) for text in pair)
        messages += [Message("user", question), Message("assistant", answer)]
    # The instruction column may be empty or null where the whole question stands in the query column.
    parts = [fields.text("prompt", required=not fields.text("query")), fields.text("query")]
    messages.append(Message("user", "\n".join(part for part in parts if part)))
    return Conversation(messages, system=fields.text("system"), tools=fields.tools())


def reply(fields: RecordFields, role: str) -> Message:
    """The reply in the column of that role: text, or a list.

    A list holds one text; where one column is both chosen and rejected it holds the two in this order.
    """
    value = fields.value(role, required=True)
    if isinstance(value, list):
        is_pair = role in ("chosen", "rejected") and fields.columns["chosen"] == fields.columns["rejected"]
        if len(value) != 1 + is_pair:
            expected = "a list [chosen, rejected]" if is_pair else "text, or a list of one text"
            raise fields.wrong_type(fields.column(role), expected, value)
        value = value[-1 if role == "rejected" else 0]
    return Message("assistant", fields.as_text(value, fields.column(role)))
