"""The text that a template gives for a conversation, without a tokenizer.

In the expected texts of the tests `¦` stands between source and target: source¦target¦source¦target.
"""

from typing import Any

from mindspeed_llm.tasks.preprocess.layouts import RenderOptions, make_layout, piece_text
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import load_template

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def render(name: str, conversation: Conversation, *, one_turn: bool = False, **options: Any) -> str:
    """Sources and targets of the conversation in the template `name`; bos is <s>, and eos </s> unless it names one."""
    template = load_template(name)
    eos = template.stop_words[0] if template.replace_eos else "</s>"
    parts = [
        piece_text(part, bos_token="<s>", eos_token=eos)
        for turn in make_layout(template, RenderOptions(**options)).pieces(conversation, one_turn=one_turn)
        for part in turn[:2]
    ]
    return "¦".join(parts)


def chat(*texts: str, system: str = "", tools: str = "") -> Conversation:
    """A conversation of questions and answers in turn."""
    return Conversation([Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)], system, tools)
