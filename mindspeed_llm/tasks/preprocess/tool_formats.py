"""How tools and tool calls are written: one small declaration per format.

`default` is the plain listing with Action / Action Input lines; `qwen` is the official text of Qwen 2.5 and Qwen 3.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.readers import json_problem


@dataclass(frozen=True)
class ToolFormat:
    """`listing` writes the tools into the system text; `call` writes one call (name, arguments as JSON text).

    `join` stands between parallel calls. A format whose `call` is None fills the placeholders {{name}} and
    {{arguments}} of the template's function slot instead.
    """

    listing: Callable[[list[dict[str, Any]]], str]
    call: Callable[[str, str], str] | None
    join: str = "\n"


def parse_tools(text: str) -> list[dict[str, Any]]:
    """Parse the tools of a record to bare function descriptions; entries wrapped as OpenAI does are unwrapped."""
    try:
        tools = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"tools: not valid JSON ({json_problem(error)} character {error.pos + 1}): {text[:60]!r}"
        ) from error
    tools = tools if isinstance(tools, list) else [tools]
    bare = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    for tool in bare:
        if not isinstance(tool, dict) or "name" not in tool:
            raise UserError(f"tools: expected functions with a name, found {json.dumps(tool, default=str)[:60]}")
    return bare


def parse_calls(text: str) -> list[tuple[str, str]] | None:
    """Parse a function turn, one call or a list, to (name, arguments as JSON text); None when it is not such JSON."""
    try:
        calls = json.loads(text)
    except json.JSONDecodeError:
        return None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call and "arguments" in call for call in calls):
        return None
    return [(str(call["name"]), _arguments(call["arguments"])) for call in calls]


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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


def _qwen_listing(tools: list[dict[str, Any]]) -> str:
    lines = "".join("\n" + json.dumps({"type": "function", "function": tool}, ensure_ascii=False) for tool in tools)
    return (
        "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>{lines}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _qwen_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'


TOOL_FORMATS: dict[str, ToolFormat] = {
    "default": ToolFormat(listing=_plain_listing, call=None),
    "qwen": ToolFormat(listing=_qwen_listing, call=_qwen_call),
}
"""Name (`data.tool_format`, `tool_format` of a template) -> format."""
