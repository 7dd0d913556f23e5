"""The format of DeepSeek V4: no system token, thoughts opened or closed by the prompt, calls in DSML.

<bos> [effort] system [tools] <User>question<Assistant><think> | thought</think>reply<eos>
                                                      </think> | reply<eos>               (chat mode)

Thinking (`enable_thinking` true) shows the thought of the last reply, of all replies when the conversation has tools
or `drop_thinking` is False. Results of tools are part of the next question, in the order of their calls.
"""

from collections.abc import Iterator, Sequence

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.layouts.base import PieceTurn, RenderOptions, split_turns
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import Template
from mindspeed_llm.tasks.preprocess.tool_formats import ToolCall, parse_calls, parse_tools, to_json

_END = "<｜end▁of▁sentence｜>"
_DSML = "｜DSML｜"
_OPEN, _CLOSE = "<think>", "</think>"


class DeepSeek4Layout:
    """The prefix slot of the template begins the conversation, with {{effort}} in it."""

    def __init__(self, template: Template, options: RenderOptions) -> None:
        if options.reasoning_effort and not options.enable_thinking:
            raise UserError(
                f"--reasoning-effort {options.reasoning_effort} needs --enable-thinking true with template "
                f"{template.name!r}, which follows it in thinking mode only; give it, or leave the effort out"
            )
        self._template, self._options = template, options
        self._effort = template.efforts[options.reasoning_effort] if options.reasoning_effort else ""

    def pieces(
        self, conversation: Conversation, *, one_turn: bool = False, empty_in_target: bool = False
    ) -> Iterator[PieceTurn]:
        turns = split_turns(conversation.messages)
        has_tools = bool(conversation.tools) or any(_calls(reply) for _, reply in turns if reply is not None)
        keeps_all = has_tools or not self._options.drop_thinking
        for index, (sources, reply) in enumerate(turns):
            source = self._template.prefix.fill(effort=self._effort) if index == 0 else []
            if index == 0 and (system := self._system(conversation)):
                source.append(system)
            thinks = bool(self._options.enable_thinking) and (keeps_all or index == len(turns) - 1)
            before = turns[index - 1][1] if index else None
            question = "\n\n".join(_question_parts(sources, _calls(before) if before else []))
            source.append(f"<｜User｜>{question}<｜Assistant｜>{_OPEN if thinks else _CLOSE}")
            if reply is None:
                yield source, [], None
                return
            yield source, [_reply(reply, thinks)], reply

    def _system(self, conversation: Conversation) -> str:
        system = conversation.system or self._template.default_system
        if conversation.tools:
            system += "\n\n" + _tools_text([to_json(tool) for tool in parse_tools(conversation.tools)])
        return system


def _reply(reply: Message, thinks: bool) -> str:
    calls = _calls(reply)
    thought, content = reply.reasoning, reply.content
    if calls:
        content = reply.preface
    elif reply.preface:
        content = reply.preface + content
    if not thought:
        thought, content = _split_thought(content)
    block = f"\n\n{_tag('tool_calls', chr(10).join(map(_call_text, calls)))}" if calls else ""
    return f"{thought + _CLOSE if thinks else ''}{content}{block}{_END}"


def _split_thought(text: str) -> tuple[str, str]:
    """(thought, rest) of text that begins with a closed thought; white space around both is dropped."""
    if not text.lstrip().startswith(_OPEN) or _CLOSE not in text:
        return "", text
    thought, _, rest = text.lstrip().removeprefix(_OPEN).partition(_CLOSE)
    return thought.strip(), rest.lstrip()


def _calls(reply: Message) -> list[ToolCall]:
    return (parse_calls(reply.content) or []) if reply.role == "function" else []


def _question_parts(sources: Sequence[Message], calls: Sequence[ToolCall]) -> Iterator[str]:
    """Texts of the messages; results change places among themselves, so that they follow the order of the calls."""
    order = {call.call_id: position for position, call in enumerate(calls) if call.call_id}
    results = [message for message in sources if message.role == "observation"]
    in_order = iter(sorted(results, key=lambda result: order.get(result.call_id, 0)) if order else results)
    for message in sources:
        is_result = message.role == "observation"
        yield f"<tool_result>{next(in_order).content}</tool_result>" if is_result else message.content


def _tag(name: str, body: str, attributes: str = "") -> str:
    return f"<{_DSML}{name}{attributes}>\n{body}\n</{_DSML}{name}>"


def _call_text(call: ToolCall) -> str:
    lines = [_parameter(name, value) for name, value in call.named_arguments.items()]
    return _tag("invoke", "\n".join(lines), f' name="{call.name}"')


def _parameter(name: str, value: object) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else to_json(value)
    return f'<{_DSML}parameter name="{name}" string="{str(is_text).lower()}">{text}</{_DSML}parameter>'


def _tools_text(schemas: Sequence[str]) -> str:
    value = '<{d}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{d}parameter>\n...'
    example = "\n".join(
        (
            _tag("invoke", value.format(d=_DSML), ' name="$TOOL_NAME"'),
            _tag("invoke", "...", ' name="$TOOL_NAME2"'),
        )
    )
    listing = "\n".join(schemas)
    return (
        "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools by "
        f'writing a "<{_DSML}tool_calls>" block like the following:\n\n{_tag("tool_calls", example)}\n\n'
        'String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, '
        'arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
        f"If thinking_mode is enabled (triggered by {_OPEN}), you MUST output your complete reasoning inside "
        f"{_OPEN}...{_CLOSE} BEFORE any tool calls or final response.\n\n"
        f"Otherwise, output directly after {_CLOSE} with tool calls or final response.\n\n"
        f"### Available Tool Schemas\n\n{listing}\n\n"
        "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
    )
