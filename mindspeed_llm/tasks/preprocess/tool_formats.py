"""How tools and tool calls are written: one small declaration per format.

`default` is the plain listing with Action / Action Input lines. The others are the official texts of their model
families: `qwen` (Qwen 2.5, Qwen 3), `ling` (Ling 2.0), `glm4` (GLM-4), `glm4_moe` (GLM-4.5, GLM-4.6), `chatglm3`.
`qwen_legacy` and `ling_legacy` keep the white space of Ascend's MindSpeed-LLM around the same texts.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.tasks.preprocess.json_stream import json_problem
from mindspeed_llm.tasks.preprocess.records.fields import BadRecord


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool. `arguments` is what the record holds: an object mostly, else text that is no JSON."""

    name: str
    arguments: Any
    call_id: str = ""

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text; text stays as it is."""
        return self.arguments if isinstance(self.arguments, str) else to_json(self.arguments)

    @property
    def named_arguments(self) -> dict[str, Any]:
        """The arguments by name; what is no object stands under the name `arguments`."""
        value = self.arguments
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                return {"arguments": value}
        return value if isinstance(value, dict) else {"arguments": value}


@dataclass(frozen=True)
class ToolFormat:
    """`listing` writes the tools, `lead` stands between the system text and it; `call` writes one call."""

    listing: Callable[[list[dict[str, Any]]], str]
    call: Callable[[ToolCall], str]
    lead: str = ""


def parse_tools(text: str) -> list[dict[str, Any]]:
    """Parse the tools of a record to bare function descriptions; entries wrapped as OpenAI does are unwrapped."""
    try:
        tools = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRecord(
            f"tools: not valid JSON ({json_problem(error)} character {error.pos + 1}): {text[:60]!r}",
            "tools: not valid JSON",
        ) from error
    tools = tools if isinstance(tools, list) else [tools]
    bare = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    for tool in bare:
        if not isinstance(tool, dict) or "name" not in tool:
            kind = "tools: expected functions with a name"
            raise BadRecord(f"{kind}, found {json.dumps(tool, default=str)[:60]}", kind)
    return bare


def parse_calls(text: str) -> list[ToolCall] | None:
    """Parse a function turn, one call or a list of calls in JSON; None when it is not such JSON."""
    try:
        calls = json.loads(text)
    except json.JSONDecodeError:
        return None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call and "arguments" in call for call in calls):
        return None
    return [ToolCall(str(call["name"]), call["arguments"], str(call.get("id", ""))) for call in calls]


def answered_call(calls: Sequence[ToolCall], call_id: str, position: int) -> ToolCall | None:
    """The call that the result at `position` after the calls answers: by id where both have one, else by order."""
    by_id = next((call for call in calls if call_id and call.call_id == call_id), None)
    return by_id or (calls[min(position, len(calls) - 1)] if calls else None)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON as chat templates write it: characters of all scripts as they are, a space after `,` and `:`."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _plain_listing(tools: list[dict[str, Any]]) -> str:
    text = "You have access to the following tools:\n"
    for tool in tools:
        parameters = tool.get("parameters") or {}
        text += f"> Tool Name: {tool['name']}\nTool Description: {tool.get('description', '')}\nTool Args:\n"
        for name, spec in (parameters.get("properties") or {}).items():
            required = ", required" if name in (parameters.get("required") or []) else ""
            choices = f", should be one of [{', '.join(map(str, spec['enum']))}]" if spec.get("enum") else ""
            items = f", where each item should be {spec['items'].get('type', '')}" if spec.get("items") else ""
            kind, description = spec.get("type", ""), spec.get("description", "")
            text += f"  - {name} ({kind}{required}): {description}{choices}{items}\n"
        text += "\n"
    names = ", ".join(str(tool["name"]) for tool in tools)
    return (
        f"{text}Use the following format if using a tool:\n```\nAction: tool name (one of [{names}]).\n"
        "Action Input: the input to the tool, in a JSON format representing the kwargs "
        '(e.g. ```{"input": "hello world", "num_beams": 5}```).\n```\n'
    )


def _action_call(call: ToolCall) -> str:
    return f"Action: {call.name}\nAction Input: {call.arguments_json}"


def _signatures(tools: list[dict[str, Any]]) -> str:
    lines = "".join(to_json({"type": "function", "function": tool}) + "\n" for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{lines}</tools>\n\n"
    )


def _qwen_listing(tools: list[dict[str, Any]]) -> str:
    return (
        f"{_signatures(tools)}For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _qwen_call(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments_json}}}\n</tool_call>'


def _glm4_listing(tools: list[dict[str, Any]]) -> str:
    return (
        "你是一个名为 GLM-4 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
        "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具"
    ) + "".join(
        f"\n\n## {tool['name']}\n\n{to_json(tool, indent=4)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
        for tool in tools
    )


def _glm4_call(call: ToolCall) -> str:
    return f"{call.name}\n{call.arguments_json}"


def _glm4_moe_listing(tools: list[dict[str, Any]]) -> str:
    keys = "".join(f"<arg_key>{{arg-key-{i}}}</arg_key>\n<arg_value>{{arg-value-{i}}}</arg_value>\n" for i in (1, 2))
    return (
        f"{_signatures(tools)}For each function call, output the function name and arguments within the following XML "
        f"format:\n<tool_call>{{function-name}}\n{keys}...\n</tool_call>"
    )


def _glm4_moe_call(call: ToolCall) -> str:
    lines = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else to_json(value)}</arg_value>\n"
        for key, value in call.named_arguments.items()
    )
    return f"<tool_call>{call.name}\n{lines}</tool_call>"


def _chatglm3_listing(tools: list[dict[str, Any]]) -> str:
    return (
        "Answer the following questions as best as you can. You have access to the following tools:\n"
        f"{to_json(tools, indent=4)}"
    )


def _chatglm3_call(call: ToolCall) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in call.named_arguments.items())
    return f"{call.name}\n ```python\ntool_call({arguments})\n```"


TOOL_FORMATS: dict[str, ToolFormat] = {
    "default": ToolFormat(_plain_listing, _action_call),
    "qwen": ToolFormat(_qwen_listing, _qwen_call, lead="\n\n"),
    "qwen_legacy": ToolFormat(lambda tools: f"\n\n{_qwen_listing(tools)}", _qwen_call),
    "ling": ToolFormat(_qwen_listing, _qwen_call, lead="\n"),
    "ling_legacy": ToolFormat(lambda tools: f"{_qwen_listing(tools)}\ndetailed thinking off", _qwen_call),
    "glm4": ToolFormat(_glm4_listing, _glm4_call, lead="\n\n"),
    "glm4_moe": ToolFormat(_glm4_moe_listing, _glm4_moe_call, lead="\n\n"),
    "chatglm3": ToolFormat(_chatglm3_listing, _chatglm3_call, lead="\n"),
}
"""Name (`data.tool_format`, `tool_format` of a template) -> format."""
