"""Record formats: records of every layout become one `Conversation`.

A record whose structure cannot be right (a missing column, a number where text belongs) raises `BadRecord`, a
UserError with file, line and key. A conversation that is well formed but in the wrong order (roles out of order, ends
with the user) raises `BadConversation`; one that holds nothing to train on raises `UnusableRecord`, its base class.
Callers count what they do not let end the run.
"""

from mindspeed_llm.tasks.preprocess.records.conversation import (
    EMPTY_PROMPT,
    SOURCE_ROLES,
    TARGET_ROLES,
    BadConversation,
    Conversation,
    Message,
    UnusableRecord,
)
from mindspeed_llm.tasks.preprocess.records.fields import BadRecord, missing_column, wrong_type
from mindspeed_llm.tasks.preprocess.records.formats import (
    FORMATS,
    Preference,
    Prompt,
    RecordFormat,
    RecordLayout,
    to_conversation,
    to_preference,
    to_prompt,
)
from mindspeed_llm.tasks.preprocess.records.sharegpt import SHAREGPT_TAGS

__all__ = [
    "EMPTY_PROMPT",
    "FORMATS",
    "SHAREGPT_TAGS",
    "SOURCE_ROLES",
    "TARGET_ROLES",
    "BadConversation",
    "BadRecord",
    "Conversation",
    "Message",
    "Preference",
    "Prompt",
    "RecordFormat",
    "RecordLayout",
    "UnusableRecord",
    "missing_column",
    "to_conversation",
    "to_preference",
    "to_prompt",
    "wrong_type",
]
