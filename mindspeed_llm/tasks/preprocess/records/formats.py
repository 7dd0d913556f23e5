"""The table of record formats, and records as conversations, preference pairs and prompts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import alpaca, data_sets, openai, sharegpt
from mindspeed_llm.tasks.preprocess.records.conversation import (
    TARGET_ROLES,
    BadConversation,
    Conversation,
    Message,
    check_order,
)
from mindspeed_llm.tasks.preprocess.records.fields import RecordFields


@dataclass(frozen=True)
class RecordFormat:
    """How records of one layout are read.

    `columns` and `tags` are the defaults, `required` the columns that every record must have. `messages` reads the
    conversation; where `separate_reply` is set, without the last reply, which stands in the column "response". `reply`
    reads one reply from a column of its own ("response", "chosen", "rejected").
    """

    columns: Mapping[str, str]
    required: tuple[str, ...]
    messages: Callable[[RecordFields], Conversation]
    reply: Callable[[RecordFields, str], Message] | None = None
    separate_reply: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Preference:
    """A prompt (it ends with a source turn) with the reply that is preferred and the one that is not."""

    prompt: Conversation
    chosen: Message
    rejected: Message


@dataclass(frozen=True)
class Prompt:
    """A prompt (it ends with a source turn), and the answer where the record has one."""

    prompt: Conversation
    answer: Message | None


@dataclass(frozen=True)
class RecordLayout:
    """How the records of a data set are read: the name of the format, its columns and its tags."""

    formatting: str
    columns: Mapping[str, str | None]
    tags: Mapping[str, str | None]


def to_conversation(
    record: Record, formatting: str, columns: Mapping[str, str | None], tags: Mapping[str, str | None]
) -> Conversation:
    """Convert a record of the named format; the text of the package says what is raised when."""
    layout, fields = FORMATS[formatting], RecordFields(record, columns, tags)
    conversation = layout.messages(fields)
    if layout.separate_reply:
        assert layout.reply is not None
        conversation = replace(conversation, messages=[*conversation.messages, layout.reply(fields, "response")])
    check_order(conversation.messages, ends_with_reply=True, first_place=conversation.first_place)
    return conversation


def to_preference(
    record: Record, formatting: str, columns: Mapping[str, str | None], tags: Mapping[str, str | None]
) -> Preference:
    """Convert a record with two replies to the same prompt; raises as `to_conversation` does."""
    layout, fields = FORMATS[formatting], RecordFields(record, columns, tags)
    assert layout.reply is not None
    prompt = layout.messages(fields)
    check_order(prompt.messages, ends_with_reply=False, first_place=prompt.first_place)
    chosen, rejected = layout.reply(fields, "chosen"), layout.reply(fields, "rejected")
    if chosen.role not in TARGET_ROLES or rejected.role not in TARGET_ROLES:
        raise BadConversation("chosen or rejected is not a reply")
    return Preference(prompt, chosen, rejected)


def to_prompt(
    record: Record,
    formatting: str,
    columns: Mapping[str, str | None],
    tags: Mapping[str, str | None],
    *,
    answer_required: bool,
) -> Prompt:
    """Convert a record to what the model is asked, and the answer that it has for it; raises as `to_conversation` does.

    A record without an answer is all prompt, unless `answer_required`.
    """
    layout, fields = FORMATS[formatting], RecordFields(record, columns, tags)
    conversation = layout.messages(fields)
    messages, answer = conversation.messages, None
    if layout.separate_reply:
        assert layout.reply is not None
        if answer_required or fields.value("response") is not None:
            answer = layout.reply(fields, "response")
    elif messages and messages[-1].role in TARGET_ROLES:
        messages, answer = messages[:-1], messages[-1]
    elif answer_required:
        raise BadConversation("conversation does not end with a reply")
    check_order(messages, ends_with_reply=False, first_place=conversation.first_place)
    return Prompt(replace(conversation, messages=messages), answer)


FORMATS: dict[str, RecordFormat] = {
    "alpaca": RecordFormat(
        columns=alpaca.COLUMNS,
        required=("prompt", "response"),
        messages=alpaca.prompt,
        reply=alpaca.reply,
        separate_reply=True,
    ),
    "sharegpt": RecordFormat(
        columns=sharegpt.COLUMNS,
        required=("messages",),
        messages=sharegpt.messages,
        reply=sharegpt.reply,
        tags=sharegpt.SHAREGPT_TAGS,
    ),
    "openai": RecordFormat(
        columns=openai.COLUMNS,
        required=("messages",),
        messages=openai.messages,
        reply=openai.reply,
    ),
    "belle": RecordFormat(
        columns=data_sets.BELLE_COLUMNS,
        required=("prompt", "response"),
        messages=data_sets.belle,
        reply=alpaca.reply,
        separate_reply=True,
    ),
    "moss": RecordFormat(columns=data_sets.MOSS_COLUMNS, required=("messages",), messages=data_sets.moss),
    "leetcode": RecordFormat(
        columns=data_sets.LEETCODE_COLUMNS,
        required=("problem", "code", "explanation"),
        messages=data_sets.leetcode,
    ),
}
"""Format name (`formatting` of a data set) -> how its records are read."""
