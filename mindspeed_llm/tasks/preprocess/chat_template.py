"""Render with the tokenizer's own chat template, with loss masks found from the template itself.

Where the template marks replies with {% generation %}, that mask is taken. Else the template is rendered for every
prefix of the conversation: a reply is what lies between the rendering up to it (with the generation prompt) and the
rendering that includes it. This holds only when renderings of prefixes are prefixes of the whole, which is checked.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.records import SOURCE_ROLES, TARGET_ROLES, Conversation, Message
from mindspeed_llm.tasks.preprocess.render import Turn
from mindspeed_llm.tasks.preprocess.tool_formats import parse_calls, parse_tools

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplateRenderer:
    """Render conversations with `tokenizer.apply_chat_template`.

    `last_only` asks for the mask of the last reply alone (mask_history), which templates that rewrite earlier turns can
    still give.
    """

    efficient_eos_id: int | None = None

    def __init__(
        self,
        tokenizer: Any,
        *,
        enable_thinking: bool | None = None,
        default_system: str | None = None,
        last_only: bool = False,
    ) -> None:
        self._tokenizer, self._default_system, self._last_only = tokenizer, default_system or "", last_only
        self._variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        template = tokenizer.get_chat_template()
        self._marks_replies = bool(_GENERATION_TAG.search(template))
        # Templates that know no reasoning field would drop the thought in silence: it is written into the reply.
        self._knows_reasoning = "reasoning_content" in template

    def turns_batch(self, conversations: Sequence[Conversation]) -> list[list[Turn]]:
        return [self.turns(conversation) for conversation in conversations]

    def pair_turns(self, prompt: Conversation, chosen: Message, rejected: Message) -> tuple[list[Turn], list[Turn]]:
        """Both sides with the mask of the last reply alone: the prompt, earlier replies included, carries no loss."""
        chosen_turns, rejected_turns = (
            self._turns(replace(prompt, messages=[*prompt.messages, reply]), last_only=True)
            for reply in (chosen, rejected)
        )
        return chosen_turns, rejected_turns

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        text = self._render(*self._inputs(conversation), generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def turns(self, conversation: Conversation) -> list[Turn]:
        """Token ids of the conversation, cut into turns where replies begin and end."""
        return self._turns(conversation, last_only=self._last_only)

    def _turns(self, conversation: Conversation, *, last_only: bool) -> list[Turn]:
        messages, tools = self._inputs(conversation)
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [message.loss for message in conversation.messages if message.role in TARGET_ROLES]
        if self._marks_replies:
            return self._marked_turns(messages, tools, trained)
        text = self._render(messages, tools)
        spans = []
        for index in replies[-1:] if last_only else replies:
            spans.append(self._reply_span(text, messages, tools, index))
        if last_only:
            trained = trained[-1:]
        return self._cut(text, spans, trained)

    def _inputs(self, conversation: Conversation) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as the template takes them; raises UserError when it leaves tools out."""
        messages, tools = self._messages(conversation), None
        if conversation.tools:
            tools = [{"type": "function", "function": tool} for tool in parse_tools(conversation.tools)]
        if tools or any("tool_calls" in message for message in messages):
            self._check_tools_shown(messages, tools)
        return messages, tools

    def _messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        system = conversation.system or self._default_system
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        return messages + [self._message(message) for message in conversation.messages]

    def _message(self, message: Message) -> dict[str, Any]:
        if message.role in SOURCE_ROLES:
            return {"role": "user" if message.role == "user" else "tool", "content": message.content}
        reply: dict[str, Any] = {"role": "assistant", "content": message.content}
        calls = parse_calls(message.content) if message.role == "function" else None
        if calls is not None:
            functions = [{"name": name, "arguments": _object_or_text(arguments)} for name, arguments in calls]
            reply["content"] = message.preface
            reply["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        if message.reasoning and self._knows_reasoning:
            reply["reasoning_content"] = message.reasoning
        elif message.reasoning:
            reply["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{reply['content']}"
        return reply

    def _check_tools_shown(self, messages: list[dict[str, Any]], tools: Any) -> None:
        """Raise UserError when the template leaves out the tools or a call: the sample would teach something else."""
        text = self._render(messages, tools)
        names = [tool["function"]["name"] for tool in tools or []]
        names += [call["function"]["name"] for message in messages for call in message.get("tool_calls", [])]
        missing = next((name for name in names if name not in text), None)
        if missing is not None:
            raise UserError(
                f"the tokenizer's chat template leaves out the tool {missing!r}, since it knows no tools; name a "
                "template that does with data.template, such as qwen3 or chatml"
            )

    def _render(self, messages: list[dict[str, Any]], tools: Any, *, generation_prompt: bool = False) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self._variables
            )
        except Exception as error:  # jinja2 errors of the user's template, whatever their type
            raise UserError(f"the tokenizer's chat template failed: {type(error).__name__}: {error}") from error

    def _reply_span(self, text: str, messages: list[dict[str, Any]], tools: Any, index: int) -> tuple[int, int]:
        """Character span of reply `index` in the rendering of the whole conversation."""
        prompt = self._render(messages[:index], tools, generation_prompt=True)
        is_last = index == len(messages) - 1
        until_reply = text if is_last else self._render(messages[: index + 1], tools)
        if not (until_reply.startswith(prompt) and text.startswith(until_reply)):
            advice = "" if self._last_only else "set data.mask_history to train on the last reply only, or "
            raise UserError(
                "data.template is null, so the tokenizer's chat template is used, but it renders earlier turns of a "
                "conversation differently once later ones follow, so that replies cannot be told from prompts; "
                f"{advice}name a template with data.template"
            )
        return len(prompt), len(until_reply)

    def _cut(self, text: str, spans: list[tuple[int, int]], trained: list[bool]) -> list[Turn]:
        if self._tokenizer.is_fast:
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]

            def take(begin: int, end: int) -> list[int]:
                return [token for token, start in zip(ids, starts, strict=True) if begin <= start < end]
        else:

            def take(begin: int, end: int) -> list[int]:
                return self._tokenizer.encode(text[begin:end], add_special_tokens=False)

        turns, position = [], 0
        for (begin, end), train in zip(spans, trained, strict=True):
            turns.append(Turn(take(position, begin), take(begin, end), train))
            position = end
        if position < len(text):
            turns.append(Turn(take(position, len(text)), []))
        return turns

    def _marked_turns(self, messages: list[dict[str, Any]], tools: Any, trained: list[bool]) -> list[Turn]:
        encoded = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._variables,
        )
        ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        turns: list[Turn] = []
        position = 0
        while position < len(ids):
            begin = _run_end(mask, position, 0)
            end = _run_end(mask, begin, 1)
            train = trained[len(turns)] if len(turns) < len(trained) else True
            turns.append(Turn(ids[position:begin], ids[begin:end], train))
            position = end
        return turns


def _run_end(mask: list[int], start: int, value: int) -> int:
    end = start
    while end < len(mask) and bool(mask[end]) == bool(value):
        end += 1
    return end


def _object_or_text(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments
