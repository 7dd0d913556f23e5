"""OpenAI's harmony format, as the chat template of gpt-oss writes it.

<|start|>system .. <|start|>developer .. <|start|>user .. <|start|>assistant
    | <|channel|>analysis.. <|start|>assistant<|channel|>final<|message|>reply<|return|>

The thought of a reply stands in a message of its own (channel analysis), a call is a message to a function (channel
commentary), and only the last reply of a conversation ends in <|return|>. Thoughts of earlier replies are left out, and
those of calls that a final reply follows. There is no empty thought.
"""

from collections.abc import Iterator, Sequence

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.layouts.base import PieceTurn, RenderOptions, split_turns
from mindspeed_llm.tasks.preprocess.layouts.thoughts import split_thought
from mindspeed_llm.tasks.preprocess.layouts.typescript import namespace
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import Piece, Template
from mindspeed_llm.tasks.preprocess.tool_formats import ToolCall, answered_call, parse_calls, parse_tools, to_json

_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_NEXT = "<|start|>assistant"


class HarmonyLayout:
    """The prefix slot of the template is the system message, with {{effort}} and {{tools}} in it."""

    def __init__(self, template: Template, options: RenderOptions) -> None:
        self._template, self._options = template, options
        self._effort = template.efforts[options.reasoning_effort or template.default_effort]

    def pieces(
        self, conversation: Conversation, *, one_turn: bool = False, empty_in_target: bool = False
    ) -> Iterator[PieceTurn]:
        turns = split_turns(conversation.messages)
        finals = [i for i, (_, reply) in enumerate(turns) if reply is not None and not _calls(reply)]
        last_final = finals[-1] if finals else -1
        for index, (sources, reply) in enumerate(turns):
            source = self._opening(conversation) if index == 0 else []
            before = turns[index - 1][1] if index else None
            source.append("".join(_results_and_questions(sources, _calls(before) if before else [])) + _NEXT)
            if reply is None:
                yield source, [], None
                return
            is_last, calls = index == len(turns) - 1, _calls(reply)
            shows_thought = is_last or (bool(calls) and index > last_final) or not self._options.drop_thinking
            target = self._reply(reply, calls, shows_thought, "<|return|>" if is_last else "<|end|>")
            yield source, [target], reply

    def _opening(self, conversation: Conversation) -> list[Piece]:
        tools = parse_tools(conversation.tools) if conversation.tools else []
        note = "\nCalls to these tools must go to the commentary channel: 'functions'." if tools else ""
        pieces = self._template.prefix.fill(effort=self._effort, tools=note)
        system = conversation.system or self._template.default_system
        if system or tools:
            instructions = f"# Instructions\n\n{system}\n\n" if system else ""
            listing = f"# Tools\n\n{namespace('functions', tools)}" if tools else ""
            pieces.append(f"<|start|>developer<|message|>{instructions}{listing}<|end|>")
        return pieces

    def _reply(self, reply: Message, calls: Sequence[ToolCall], shows_thought: bool, end: str) -> str:
        thought, preface, content = _parts(reply)
        shows_thought = shows_thought and self._options.enable_thinking is not False
        if not thought and calls and shows_thought:
            # Text in front of a call is the thought that leads to it, as in the model's own template.
            thought, preface = preface, ""
        lead = f"{_ANALYSIS}{thought}<|end|>{_NEXT}" if thought and shows_thought else ""
        if not calls:
            # Calls that are no JSON are kept as a reply.
            return f"{lead}{_FINAL}{preface}{content}{end}"
        if preface:
            lead += f"<|channel|>commentary<|message|>{preface}<|end|>{_NEXT}"
        return lead + _NEXT.join(
            f" to=functions.{call.name}<|channel|>commentary json<|message|>{_arguments(call)}<|call|>"
            for call in calls
        )


def _calls(reply: Message) -> list[ToolCall]:
    return (parse_calls(_parts(reply)[2]) or []) if reply.role == "function" else []


def _parts(reply: Message) -> tuple[str, str, str]:
    """(thought, text in front of calls, content) of a reply; the thought is found in the channels or in <think>."""
    if reply.reasoning:
        return reply.reasoning, reply.preface, reply.content
    if reply.preface:
        return *split_thought(reply.preface), reply.content
    thought, end, content = reply.content.partition(f"<|end|>{_NEXT}{_FINAL}")
    if end and thought.startswith(_ANALYSIS):
        return thought.removeprefix(_ANALYSIS), "", content
    thought, content = split_thought(reply.content)
    return thought, "", content.removeprefix(_FINAL)


def _arguments(call: ToolCall) -> str:
    """JSON of the arguments; text that is no object is a JSON string, as the model's own template writes it."""
    named = call.named_arguments
    return to_json(call.arguments if named == {"arguments": call.arguments} else named)


def _results_and_questions(sources: Sequence[Message], calls: Sequence[ToolCall]) -> Iterator[str]:
    num_results = 0
    for message in sources:
        if message.role == "user":
            yield f"<|start|>user<|message|>{message.content}<|end|>"
            continue
        call = answered_call(calls, message.call_id, num_results)
        if call is None:
            raise UserError(
                "a tool's result follows a reply that calls no tool, and the format of gpt-oss needs the tool's name"
            )
        result = to_json(message.content)
        yield f"<|start|>functions.{call.name} to=assistant<|channel|>commentary<|message|>{result}<|end|>"
        num_results += 1
