"""Thoughts of replies: found in the text, kept, dropped or written anew.

Two ways, chosen by `Thinking.parsed`. Written: the thought is text of the reply, known by the template's exact words;
every turn shows its own. Parsed: the thought is taken out of the reply and written by the template, as the published
templates of reasoning models do, which leave it out of the turns before the last question.
"""

import re
from dataclasses import dataclass

from mindspeed_llm.tasks.preprocess.layouts.base import RenderOptions
from mindspeed_llm.tasks.preprocess.records import Message
from mindspeed_llm.tasks.preprocess.templates import Template

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class ReplyText:
    """A reply in parts. `thought` is as it is written, '' for none; `preface` stands in front of calls; `empty` is the
    empty thought that the turn needs, '' for none.
    """

    thought: str
    preface: str
    content: str
    empty: str


@dataclass(frozen=True)
class Place:
    """Where a reply stands: at the end of the conversation, and after its last question."""

    is_last: bool
    after_question: bool
    one_turn: bool = False


def reply_text(template: Template, options: RenderOptions, reply: Message, place: Place) -> ReplyText:
    """Take a reply apart by the template's way with thoughts."""
    return (_parsed if template.thinking.parsed else _written)(template, options, reply, place)


def split_thought(text: str) -> tuple[str, str]:
    """(thought, the rest) of text with one thought in <think> tags in front; ('', text) for any other text.

    The opening tag may be missing, as in the output of models whose prompt opens the thought.
    """
    before, close, rest = text.partition(_CLOSE)
    lead, opening, thought = before.rpartition(_OPEN)
    if not close or _CLOSE in rest or (opening and lead.strip()):
        return "", text
    return thought.strip("\n"), rest.lstrip("\n")


def _parsed(template: Template, options: RenderOptions, reply: Message, place: Place) -> ReplyText:
    rule = template.thinking
    thought, preface, content = reply.reasoning, reply.preface, reply.content
    if not thought and preface:
        thought, preface = split_thought(preface)
    elif not thought:
        thought, content = split_thought(content)
    shown = options.enable_thinking is not False and (place.after_question or not options.drop_thinking)
    written = rule.opening + thought.strip(rule.strip) + rule.closing if thought and shown else ""
    needs_empty = rule.empty == "every" or (rule.empty == "last" and place.is_last)
    empty = rule.opening + rule.closing if needs_empty and not written else ""
    if written or empty:
        preface, content = preface.lstrip("\n"), content.lstrip("\n")
    return ReplyText(written, preface, content, empty)


def _written(template: Template, options: RenderOptions, reply: Message, place: Place) -> ReplyText:
    opening, closing = template.thinking.opening, template.thinking.closing
    thought, preface, content = "", reply.preface, reply.content
    if reply.reasoning:
        thought = opening + reply.reasoning.strip("\n") + closing
    elif reply.role == "function" and content.startswith(opening) and closing in content:
        thought, content = content[: content.index(closing) + len(closing)], content.split(closing, 1)[1]
    if not template.reasoning:
        return ReplyText(thought, preface, content, "")
    is_history = place.one_turn and not place.is_last
    if is_history or options.enable_thinking is False:
        words = f"{re.escape(opening)}.*?{re.escape(closing)}"
        thought, preface, content = (
            re.sub(words, "", text, flags=re.DOTALL).lstrip("\n") for text in (thought, preface, content)
        )
    text = thought + preface + content
    has_words = opening in text or closing in text
    return ReplyText(thought, preface, content, "" if has_words or is_history else opening + closing)


def prompt_thought(template: Template, options: RenderOptions) -> str:
    """The empty thought that a prompt ends in, so that the model answers without one; '' where it may think."""
    if not template.reasoning or options.enable_thinking is not False or template.thinking.empty == "none":
        return ""
    return template.thinking.opening + template.thinking.closing
