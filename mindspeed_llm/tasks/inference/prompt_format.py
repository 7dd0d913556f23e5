"""In what form a model is asked: a conversation as token ids, by the template that the flags name."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.arguments.checks import named_template
from mindspeed_llm.tasks.preprocess.chat_template import ChatTemplateRenderer
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.render import TemplateRenderer
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer

THINKING = {"true": True, "false": False, "none": None}
"""What templates are told with each value of --enable-thinking; None: nothing."""


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """A chat template."""

    name: str
    """For people."""
    prompt_ids: Callable[[Conversation], list[int]]
    """The token ids of a conversation that ends with a question, up to where the model begins its reply. Raises
    UserError where the template fails.
    """
    stop_words: tuple[str, ...] = ()
    """Texts, or tokens by their names, that end a reply."""

    def question_ids(self, text: str) -> list[int]:
        """The token ids of a conversation of one question."""
        return self.prompt_ids(Conversation([Message("user", text)]))


def prompt_format(args: Namespace, tokenizer: Tokenizer, *, is_chat: bool = False) -> PromptFormat | None:
    """The template that the flags name; None where they name none and texts are continued as they are.

    Args:
        is_chat: take the tokenizer's own template where the flags name none and the tokenizer has one.

    Raises:
        UserError: there is no such template, or it does not fit the tokenizer.
    """
    thinking = THINKING[args.enable_thinking]
    if args.prompt_type is not None:
        template = named_template(args)
        renderer = TemplateRenderer(
            template,
            tokenizer,
            enable_thinking=thinking,
            drop_thinking=args.drop_thinking == "true",
            reasoning_effort=args.reasoning_effort,
        )
        return PromptFormat(
            name=f"template {args.prompt_type}", prompt_ids=renderer.prompt_ids, stop_words=template.stop_words
        )
    if not args.hf_chat_template and not (is_chat and tokenizer.chat_template):
        return None
    if not tokenizer.chat_template:
        raise UserError("--hf-chat-template: the tokenizer brings no chat template; name one with --prompt-type")
    own = ChatTemplateRenderer(tokenizer, enable_thinking=thinking, only_prompts=True)
    return PromptFormat(name="the tokenizer's chat template", prompt_ids=own.prompt_ids)
