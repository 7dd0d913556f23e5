"""Render with the tokenizer's own chat template, with loss masks found from the template itself.

Where the template marks replies with {% generation %}, that mask is taken. Else `reply_spans` finds where each reply
lies in the rendering of the whole conversation, or the conversation is refused. The ids are always those of the whole
text, as `apply_chat_template` gives them.
"""

import bisect
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.layouts.thoughts import split_thought
from mindspeed_llm.tasks.preprocess.records import SOURCE_ROLES, TARGET_ROLES, Conversation, Message
from mindspeed_llm.tasks.preprocess.render import Turn
from mindspeed_llm.tasks.preprocess.reply_spans import MARKS, THOUGHT_FIELDS, reply_span
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from mindspeed_llm.tasks.preprocess.tool_formats import ToolCall, answered_call, parse_calls, parse_tools

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING_FIELD = re.compile(r"message\.thinking\b|message\[.thinking.\]")


class ChatTemplateRenderer:
    """Render conversations with `tokenizer.apply_chat_template`.

    `enable_thinking` reaches the template; False also takes the thoughts out of replies, where the template knows the
    variable. `last_only` asks for the mask of the last reply alone (mask_history), which nearly every template can
    give. Where the template writes no end mark behind replies, `efficient_eos_id` is the tokenizer's eos: a model that
    is never shown an end would not stop.
    """

    # Templates are rendered in Python, which takes longer than the tokenizer.
    runs_in_threads = False

    def __init__(
        self,
        tokenizer: Any,
        *,
        enable_thinking: bool | None = None,
        default_system: str | None = None,
        last_only: bool = False,
    ) -> None:
        self._tokenizer, self._default_system, self._last_only = (
            as_tokenizer(tokenizer),
            default_system or "",
            last_only,
        )
        self._variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        template = self._tokenizer.get_chat_template()
        self._marks_replies = bool(_GENERATION_TAG.search(template))
        # Templates that know no field for thoughts would drop them in silence: they are written into the reply.
        fields = [THOUGHT_FIELDS[0]] * (THOUGHT_FIELDS[0] in template) + [THOUGHT_FIELDS[1]] * bool(
            _THINKING_FIELD.search(template)
        )
        self._thought_field = fields[0] if fields else None
        self._drops_thoughts = enable_thinking is False and "enable_thinking" in template
        self.efficient_eos_id: int | None = None if self._ends_replies() else self._tokenizer.eos_token_id

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
        trained = [message.loss for message in conversation.messages if message.role in TARGET_ROLES]
        if self._marks_replies:
            return self._marked_turns(messages, tools, trained)
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if last_only:
            replies, trained = replies[-1:], trained[-1:]
        text = self._render(messages, tools)

        def render(some: list[dict[str, Any]], **options: bool) -> str:
            return self._render(some, tools, **options)

        spans = [reply_span(render, text, messages, index) for index in replies]
        proven = [span for span in spans if span is not None]
        if len(proven) < len(spans) or any(a[1] > b[0] for a, b in itertools.pairwise(proven)):
            advice = "" if last_only else "set data.mask_history to train on the last reply only, or "
            raise UserError(
                "data.template is null, so the tokenizer's chat template is used, but it renders earlier turns of a "
                "conversation differently once later ones follow, so that replies cannot be told from prompts; "
                f"{advice}name a template with data.template"
            )
        return self._cut(text, proven, trained)

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
        calls: list[ToolCall] = []
        num_results = 0
        for message in conversation.messages:
            if message.role == "observation":
                call = answered_call(calls, message.call_id, num_results)
                named = {"name": call.name, "tool_call_id": call.call_id or message.call_id} if call else {}
                messages.append({"role": "tool", "content": message.content, **{k: v for k, v in named.items() if v}})
                num_results += 1
                continue
            calls, num_results = (parse_calls(message.content) or []) if message.role == "function" else [], 0
            messages.append(self._message(message, calls))
        return messages

    def _message(self, message: Message, calls: Sequence[ToolCall]) -> dict[str, Any]:
        if message.role in SOURCE_ROLES:
            return {"role": "user", "content": message.content}
        preface, content, reasoning = message.preface, message.content, message.reasoning
        if self._drops_thoughts:
            preface, content, reasoning = split_thought(preface)[1], split_thought(content)[1], ""
        reply: dict[str, Any] = {"role": "assistant", "content": preface + content}
        if calls:
            reply["content"] = preface
            reply["tool_calls"] = [_call_object(call) for call in calls]
        if reasoning and self._thought_field:
            reply[self._thought_field] = reasoning
        elif reasoning:
            reply["content"] = f"<think>\n{reasoning}\n</think>\n\n{reply['content']}"
        return reply

    def _check_tools_shown(self, messages: list[dict[str, Any]], tools: Any) -> None:
        """Raise UserError when the template leaves out a tool or a call: the sample would teach something else."""
        names: list[str] = []

        def marked(function: dict[str, Any]) -> dict[str, Any]:
            names.append(function["name"])
            return {**function, "name": f"{MARKS[0]}{len(names)}X"}

        marked_tools = [{**tool, "function": marked(tool["function"])} for tool in tools or []] or None
        marked_messages = [
            {**m, "tool_calls": [{**call, "function": marked(call["function"])} for call in m["tool_calls"]]}
            if "tool_calls" in m
            else m
            for m in messages
        ]
        text = self._render(marked_messages, marked_tools)
        missing = next((name for i, name in enumerate(names, 1) if f"{MARKS[0]}{i}X" not in text), None)
        if missing is not None:
            raise UserError(
                f"the tokenizer's chat template leaves out the tool {missing!r}, since it knows no tools, or fewer "
                "calls at once; name a template that does with data.template, such as qwen3 or chatml"
            )

    def _ends_replies(self) -> bool:
        """Whether the template writes something behind the last reply; True where a plain conversation fails in it."""
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": MARKS[0]}]
        try:
            return not self._render(messages, None).endswith(MARKS[0])
        except UserError:
            return True

    def _render(
        self, messages: list[dict[str, Any]], tools: Any, *, generation_prompt: bool = False, defaults: bool = False
    ) -> str:
        variables = {} if defaults else self._variables
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **variables
            )
        except Exception as error:  # jinja2 errors of the user's template, whatever their type
            raise UserError(f"the tokenizer's chat template failed: {type(error).__name__}: {error}") from error

    def _cut(self, text: str, spans: Sequence[tuple[int, int]], trained: Sequence[bool]) -> list[Turn]:
        ids, token_at = self._tokens(text)
        turns, position = [], 0
        for (begin, end), train in zip(spans, trained, strict=True):
            first, last = token_at(begin), token_at(end)
            turns.append(Turn(ids[position:first], ids[first:last], train))
            position = last
        if position < len(ids):
            turns.append(Turn(ids[position:], []))
        return turns

    def _tokens(self, text: str) -> tuple[list[int], Callable[[int], int]]:
        """Ids of the text, and the number of tokens that begin before a character."""
        if self._tokenizer.is_fast:
            ids, offsets = self._tokenizer.encode_with_offsets(text)
            starts = [start for start, _ in offsets]
            return list(ids), lambda character: bisect.bisect_left(starts, character)
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))

        def token_at(character: int) -> int:
            # Without offsets: the tokens that the text up to the character and the whole text have in common.
            front = self._tokenizer.encode(text[:character], add_special_tokens=False)
            return next(
                (i for i, (a, b) in enumerate(zip(front, ids, strict=False)) if a != b), min(len(front), len(ids))
            )

        return ids, token_at

    def _marked_turns(self, messages: list[dict[str, Any]], tools: Any, trained: Sequence[bool]) -> list[Turn]:
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
            turns.append(Turn(ids[position:begin], ids[begin:end]))
            position = end
        num_marked = sum(bool(turn.target) for turn in turns)
        if all(trained):
            return turns
        if num_marked != len(trained):
            raise UserError(
                f"the tokenizer's chat template marks {num_marked} spans as replies, but the conversation has "
                f"{len(trained)}, so that the replies without loss cannot be told; name a template with data.template"
            )
        return [replace(turn, train=train) for turn, train in zip(turns, [*trained, True], strict=False)]


def _run_end(mask: Sequence[int], start: int, value: int) -> int:
    end = start
    while end < len(mask) and bool(mask[end]) == bool(value):
        end += 1
    return end


def _call_object(call: ToolCall) -> dict[str, Any]:
    named = call.named_arguments
    arguments = call.arguments if named == {"arguments": call.arguments} else named
    known_id = {"id": call.call_id} if call.call_id else {}
    return {**known_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
