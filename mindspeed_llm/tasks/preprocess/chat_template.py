"""Render with the tokenizer's own chat template, with loss masks found from the template itself.

Where the template marks replies with {% generation %}, that mask is taken, with the end mark that follows it. Else
`reply_spans` finds where each reply lies in the rendering of the whole conversation, or the conversation is refused.
The ids are always those of the whole text, as `apply_chat_template` gives them.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import generation_marks
from mindspeed_llm.tasks.preprocess.layouts.thoughts import split_thought
from mindspeed_llm.tasks.preprocess.once import warn_once
from mindspeed_llm.tasks.preprocess.records import SOURCE_ROLES, TARGET_ROLES, Conversation, Message
from mindspeed_llm.tasks.preprocess.render import Turn
from mindspeed_llm.tasks.preprocess.reply_spans import MARKS, THOUGHT_FIELDS, reply_span
from mindspeed_llm.tasks.preprocess.token_borders import token_borders
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from mindspeed_llm.tasks.preprocess.tool_formats import ToolCall, answered_call, parse_calls, parse_tools

_THINKING_FIELD = re.compile(r"message\.thinking\b|message\[.thinking.\]")

_NAME_ONE = "name a template with data.template (--prompt-type)"
_ANY_TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class _Traits:
    """What one template does.

    `end_ids` are the tokens behind a marked reply that end it, where the mark leaves them out. `closes_by_label` says
    that nothing but white space follows a reply.
    """

    marks_replies: bool
    thought_field: str | None
    drops_thoughts: bool
    end_ids: list[int]
    closes_by_label: bool


class ChatTemplateRenderer:
    """Render conversations with `tokenizer.apply_chat_template`.

    `enable_thinking` reaches the template; False also takes the thoughts out of replies, where the template knows the
    variable. `last_only` asks for the mask of the last reply alone (mask_history), which nearly every template can
    give. `only_prompts` says that no reply will be learnt from, so that nothing is said about learning. Where the
    template writes nothing but white space behind replies, `efficient_eos_id` is the tokenizer's eos: a
    model that is never shown an end would not stop.
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
        only_prompts: bool = False,
    ) -> None:
        self._tokenizer, self._default_system, self._last_only = (
            as_tokenizer(tokenizer),
            default_system or "",
            last_only,
        )
        self._enable_thinking = enable_thinking
        self._variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._traits_of: dict[str, _Traits] = {}
        traits = self._traits(None)
        self.efficient_eos_id: int | None = self._tokenizer.eos_token_id if traits.closes_by_label else None
        if only_prompts:
            return
        if traits.closes_by_label and self.efficient_eos_id is None:
            warn_once(
                "the tokenizer's chat template writes no end mark behind replies, and the tokenizer has no eos token: "
                "the model will not learn to end its replies"
            )
        self._check_opened_thought()

    def _traits(self, tools: Any) -> _Traits:
        """Of the template that conversations with these tools use."""
        templates = self._tokenizer.chat_template
        if tools is not None and isinstance(templates, Mapping) and "tool_use" in templates:
            template = templates["tool_use"]
        else:
            try:
                template = self._tokenizer.get_chat_template()
            except ValueError as error:
                raise UserError(f"the tokenizer brings no default chat template ({error}); {_NAME_ONE}") from error
        if template not in self._traits_of:
            # Templates that know no field for thoughts would drop them in silence: they are written into the reply.
            fields = [THOUGHT_FIELDS[0]] * (THOUGHT_FIELDS[0] in template) + [THOUGHT_FIELDS[1]] * bool(
                _THINKING_FIELD.search(template)
            )
            marks_replies = bool(generation_marks.GENERATION_TAG.search(template))
            end_ids, closes_by_label = self._ending(marks_replies, tools)
            self._traits_of[template] = _Traits(
                marks_replies,
                fields[0] if fields else None,
                self._enable_thinking is False and "enable_thinking" in template,
                end_ids,
                closes_by_label,
            )
        return self._traits_of[template]

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
        traits = self._traits(tools)
        if traits.closes_by_label != (self.efficient_eos_id is not None) and self._tokenizer.eos_token_id is not None:
            raise UserError(
                "the tokenizer's chat template for tools ends replies in another way than its default template; "
                + _NAME_ONE
            )
        if conversation.messages[-1].loss:
            self._check_thought_shown(messages, tools, traits)
        trained = [message.loss for message in conversation.messages if message.role in TARGET_ROLES]
        if traits.marks_replies:
            return self._marked_turns(messages, tools, trained, traits.end_ids, last_only=last_only)
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if last_only:
            replies, trained = replies[-1:], trained[-1:]
        text = self._render(messages, tools)

        def render(some: list[dict[str, Any]], **options: bool) -> str:
            return self._render(some, tools, **options)

        spans = [reply_span(render, text, messages, index) for index in replies]
        proven = [span for span in spans if span is not None]
        if len(proven) < len(spans) or any(a[1] > b[0] for a, b in itertools.pairwise(proven)):
            advice = "" if last_only else "set data.mask_history (--mask-history) to train on the last reply only, or "
            raise UserError(
                "the tokenizer's chat template is used, since none is named, but it renders earlier turns of a "
                "conversation differently once later ones follow, so that replies cannot be told from prompts; "
                + advice
                + _NAME_ONE
            )
        return self._cut(text, proven, trained)

    def _inputs(self, conversation: Conversation) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and tools as the template takes them; raises UserError when it leaves tools out."""
        tools = None
        if conversation.tools:
            tools = [{"type": "function", "function": tool} for tool in parse_tools(conversation.tools)]
        messages = self._messages(conversation, self._traits(tools))
        if tools or any("tool_calls" in message for message in messages):
            self._check_tools_shown(messages, tools)
        return messages, tools

    def _messages(self, conversation: Conversation, traits: _Traits) -> list[dict[str, Any]]:
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
            messages.append(self._message(message, calls, traits))
        return messages

    def _message(self, message: Message, calls: Sequence[ToolCall], traits: _Traits) -> dict[str, Any]:
        if message.role in SOURCE_ROLES:
            return {"role": "user", "content": message.content}
        preface, content, reasoning = message.preface, message.content, message.reasoning
        if traits.drops_thoughts:
            preface, content, reasoning = split_thought(preface)[1], split_thought(content)[1], ""
        reply: dict[str, Any] = {"role": "assistant", "content": preface + content}
        if calls:
            reply["content"] = preface
            reply["tool_calls"] = [_call_object(call) for call in calls]
        if reasoning and traits.thought_field:
            reply[traits.thought_field] = reasoning
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
                "calls at once; name a template that does with data.template (--prompt-type), such as qwen3 or chatml"
            )

    def _check_thought_shown(self, messages: list[dict[str, Any]], tools: Any, traits: _Traits) -> None:
        """Raise UserError when the template leaves out the thought of the last reply, unless thoughts are switched
        off: it would be lost unseen. That of an earlier reply may be missing, as reasoning models expect it.
        """
        last = messages[-1]
        if last["role"] != "assistant" or self._enable_thinking is False:
            return
        if traits.thought_field and last.get(traits.thought_field):
            marked = {**last, traits.thought_field: MARKS[0]}
        else:
            thought, rest = split_thought(last["content"])
            if not thought.strip():
                return
            marked = {**last, "content": f"<think>\n{MARKS[0]}\n</think>\n\n{rest}"}
        if MARKS[0] not in self._render([*messages[:-1], marked], tools):
            raise UserError(
                "the tokenizer's chat template leaves out the thought of the last reply; name a template that shows "
                "it with data.template (--prompt-type), or set data.enable_thinking (--enable-thinking) to false to "
                "train without thoughts"
            )

    def _check_opened_thought(self) -> None:
        """Warn where the prompt opens a thought, and replies without one are shown as if it did not."""
        question = [{"role": "user", "content": "question"}]
        try:
            prompt = self._render(question, None, generation_prompt=True)
            text = self._render([*question, {"role": "assistant", "content": MARKS[0]}], None)
        except UserError:
            return
        if prompt.rstrip().endswith("<think>") and not text.startswith(prompt):
            warn_once(
                "the tokenizer's chat template begins replies with <think> when it generates, but shows replies "
                "without thoughts without it: training and generation have different prompts; to avoid it, " + _NAME_ONE
            )

    def _ending(self, marks_replies: bool, tools: Any) -> tuple[list[int], bool]:
        """`end_ids` and `closes_by_label` of a template, from a plain conversation; none where that fails in it."""
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": MARKS[0]}]
        if tools is not None:
            tools = [{"type": "function", "function": _ANY_TOOL}]
        try:
            text = self._render(messages, tools)
            ids, marked = self._masked(messages, tools) if marks_replies else ([], [])
        except UserError:
            return [], False
        _, found, rest = text.rpartition(MARKS[0])
        if not found or (marks_replies and not marked):
            return [], False
        if not marks_replies:
            return [], not rest.strip()
        begin, end = marked[-1]
        if self._tokenizer.decode(ids[begin:end]).rpartition(MARKS[0])[2].strip():
            return [], False
        end_ids = generation_marks.end_mark(ids[end:], self._is_special, self._tokenizer.decode)
        return end_ids, not end_ids

    def _is_special(self, token: int) -> bool:
        return token == self._tokenizer.eos_token_id or not self._tokenizer.decode([token], skip_special_tokens=True)

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
        ids, first_token, token_behind = token_borders(self._tokenizer, text)
        turns, position = [], 0
        for (begin, end), train in zip(spans, trained, strict=True):
            first = max(first_token(begin), position)
            last = max(token_behind(end), first) if end > begin else first
            turns.append(Turn(ids[position:first], ids[first:last], train))
            position = last
        if position < len(ids):
            turns.append(Turn(ids[position:], [], has_reply=False))
        return turns

    def _masked(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], list[generation_marks.Stretch]]:
        """Ids of the conversation, and the stretches of them that the template marks as replies."""
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self._variables,
            )
        except Exception as error:  # jinja2 errors of the user's template, whatever their type
            raise UserError(f"the tokenizer's chat template failed: {type(error).__name__}: {error}") from error
        return list(encoded["input_ids"]), generation_marks.stretches(encoded["assistant_masks"])

    def _marked_turns(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        trained: Sequence[bool],
        end_ids: list[int],
        *,
        last_only: bool,
    ) -> list[Turn]:
        ids, marked = self._masked(messages, tools)
        train = [True] * len(marked)
        if last_only or self.efficient_eos_id is not None or not all(trained):
            owners = self._owners(messages, tools, ids, marked)
            if last_only:
                last = len(trained) - 1
                marked = [stretch for stretch, owner in zip(marked, owners, strict=True) if owner == last]
                owners = [last] * len(marked)
            if len(set(owners)) < len(owners) and (last_only or self.efficient_eos_id is not None):
                raise UserError(
                    "the tokenizer's chat template marks replies in parts, of which "
                    + ("only the last would carry loss" if last_only else "each would be taught to end the reply")
                    + f"; {_NAME_ONE}"
                )
            train = [trained[owner] for owner in owners]
        turns: list[Turn] = []
        position = 0
        for (begin, end), is_trained in zip(marked, train, strict=True):
            if end_ids and ids[end : end + len(end_ids)] == end_ids:
                end += len(end_ids)
            turns.append(Turn(ids[position:begin], ids[begin:end], is_trained))
            position = end
        if position < len(ids):
            turns.append(Turn(ids[position:], [], has_reply=False))
        return turns

    def _owners(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        ids: list[int],
        marked: Sequence[generation_marks.Stretch],
    ) -> list[int]:
        """The number of the reply that each marked stretch belongs to. Raises UserError where it cannot be proven."""
        exchanged, marks = generation_marks.with_marked_sources(messages)
        found = None
        text = self._render(exchanged, tools)
        other_ids, other_marked = self._masked(exchanged, tools)
        same = [ids[a:b] for a, b in marked] == [other_ids[a:b] for a, b in other_marked]
        encoded = self._tokenizer.encode_with_offsets(text)
        if same and encoded is not None and list(encoded[0]) == other_ids:
            offsets = encoded[1]
            spans = [(offsets[a][0], offsets[b - 1][1]) for a, b in other_marked]
            found = generation_marks.owners(text, spans, marks)
        if found is None:
            raise UserError(
                "the tokenizer's chat template marks spans as replies of which it cannot be told whose they are, so "
                f"that loss on some replies only is not possible; {_NAME_ONE}"
            )
        return found


def _call_object(call: ToolCall) -> dict[str, Any]:
    named = call.named_arguments
    arguments = call.arguments if named == {"arguments": call.arguments} else named
    known_id = {"id": call.call_id} if call.call_id else {}
    return {**known_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
