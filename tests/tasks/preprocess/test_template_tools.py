"""Tools, parallel calls and results in every way to write them, as text written by hand from the formats' rules."""

import json

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import template_names
from tests.tasks.preprocess.renderings import EMPTY_THOUGHT as EMPTY
from tests.tasks.preprocess.renderings import render

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
TOOL_JSON = json.dumps(TOOL)
WRAPPED = json.dumps({"type": "function", "function": TOOL})
SIGNATURES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    f"signatures within <tools></tools> XML tags:\n<tools>\n{WRAPPED}\n</tools>\n\nFor each function call, "
)
QWEN_TOOLS = (
    f"{SIGNATURES}return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
GLM_TOOLS = (
    f"{SIGNATURES}output the function name and arguments within the following XML format:\n<tool_call>{{function-name}}"
    "\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}</arg_key>\n"
    "<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
)
PLAIN_TOOLS = (
    "You have access to the following tools:\n> Tool Name: f\nTool Description: d\nTool Args:\n  - x (integer): \n\n"
    "Use the following format if using a tool:\n```\nAction: tool name (one of [f]).\nAction Input: the input to the "
    'tool, in a JSON format representing the kwargs (e.g. ```{"input": "hello world", "num_beams": 5}```).\n```\n'
)
DSML_TOOLS = (
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools by writing "
    'a "<｜DSML｜tool_calls>" block like the following:\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="$TOOL_NAME">\n'
    '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>\n...\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="$TOOL_NAME2">\n...\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\n\n'
    'String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, '
    'arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside "
    "<think>...</think> BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n\n"
    f"### Available Tool Schemas\n\n{TOOL_JSON}\n\n"
    "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)
QWEN_CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"x": 1, "y": "谢"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
)
GLM_CALLS = (
    "\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n<arg_key>y</arg_key>\n<arg_value>谢</arg_value>\n"
    "</tool_call>\n<tool_call>f\n</tool_call>"
)
ACTIONS = 'Action: f\nAction Input: {"x": 1, "y": "谢"}\nAction: f\nAction Input: {}'
RESPONSES = "\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"

WITH_TOOLS = {
    "default": f"S\n{PLAIN_TOOLS}\nHuman: q\nAssistant:¦{ACTIONS}</s>¦\nHuman: 1\n2\nAssistant:¦a</s>".replace(
        "S\n", "S", 1
    ),
    "llama2": (
        f"<s>[INST] <<SYS>>\nS{PLAIN_TOOLS}\n<</SYS>>\n\nq [/INST]¦ {ACTIONS} </s>¦<s>[INST] 1\n2 [/INST]¦ a </s>"
    ),
    "deepseek2": f"<s>S{PLAIN_TOOLS}\n\nUser: q\n\nAssistant:¦ {ACTIONS}</s>¦User: 1\n2\n\nAssistant:¦ a</s>",
    "chatglm2": (f"[gMASK]sopS{PLAIN_TOOLS}[Round 1]\n\n问：q\n\n答：¦{ACTIONS}¦\n\n[Round 2]\n\n问：1\n2\n\n答：¦a"),
    "qwen3": (
        f"<|im_start|>system\nS\n\n{QWEN_TOOLS}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        f"¦{QWEN_CALLS}<|im_end|>\n¦<|im_start|>user{RESPONSES}<|im_end|>\n<|im_start|>assistant\n{EMPTY}"
        "¦a<|im_end|>\n"
    ),
    "qwen3_legacy": (
        f"<|im_start|>system\nS\n\n{QWEN_TOOLS}<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        f"{EMPTY}¦{QWEN_CALLS}<|im_end|>\n¦<|im_start|>user{RESPONSES}<|im_end|>\n<|im_start|>assistant\n{EMPTY}"
        "¦a<|im_end|>\n"
    ),
    "bailing_mini": (
        f"<role>SYSTEM</role>S\n{QWEN_TOOLS}\ndetailed thinking off<|role_end|><role>HUMAN</role>q<|role_end|>"
        f"<role>ASSISTANT</role>¦{QWEN_CALLS}<|role_end|>¦<role>OBSERVATION</role>{RESPONSES}<|role_end|>"
        "<role>ASSISTANT</role>¦a<|role_end|>"
    ),
    "bailing_mini_legacy": (
        f"<role>SYSTEM</role>S{QWEN_TOOLS}\ndetailed thinking off<|role_end|><role>HUMAN</role>q<|role_end|>"
        f"<role>ASSISTANT</role>¦{QWEN_CALLS}<|role_end|>¦<role>OBSERVATION</role>{RESPONSES}<|role_end|>"
        "<role>ASSISTANT</role>¦a<|role_end|>"
    ),
    "glm4": (
        "[gMASK]<sop><|system|>\n你是一个名为 GLM-4 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
        "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具\n\n## f\n\n"
        f"{json.dumps(TOOL, indent=4)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。<|system|>\nS"
        '<|user|>\nq<|assistant|>¦f\n{"x": 1, "y": "谢"}<|assistant|>f\n{}'
        "¦<|observation|>\n1<|observation|>\n2<|assistant|>¦\na"
    ),
    "glm4_moe": (
        f"[gMASK]<sop><|system|>\n{GLM_TOOLS}<|system|>\nS<|user|>\nq<|assistant|>\n<think></think>"
        f"¦{GLM_CALLS}<|observation|>¦{RESPONSES}<|assistant|>\n<think></think>¦\na<|user|>"
    ),
    "chatglm3": (
        "[gMASK]sop<|system|>\n S\nAnswer the following questions as best as you can. You have access to the following "
        f"tools:\n{json.dumps([TOOL], indent=4)}<|user|>\n q<|assistant|>"
        "¦f\n ```python\ntool_call(x=1, y='谢')\n```<|assistant|>f\n ```python\ntool_call()\n```"
        "¦<|observation|>\n 1\n2<|assistant|>¦\n a"
    ),
    "chatglm3_system_legacy": (
        f"[gMASK]sop<|system|>\nS{PLAIN_TOOLS}<|user|>\nq<|assistant|>"
        '¦f\n{"x": 1, "y": "谢"}\nf\n{}¦<|observation|>\n1\n2<|assistant|>¦\na'
    ),
    "gpt_oss": (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2025-06-28\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
        "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nS\n\n# Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// d\ntype f = (_: {\nx?: number,\n}) => any;\n\n} // namespace functions<|end|>"
        "<|start|>user<|message|>q<|end|><|start|>assistant"
        '¦ to=functions.f<|channel|>commentary json<|message|>{"x": 1, "y": "谢"}<|call|>'
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        '¦<|start|>functions.f to=assistant<|channel|>commentary<|message|>"1"<|end|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
        "¦<|channel|>final<|message|>a<|return|>"
    ),
    "deepseek4": (
        f"<｜begin▁of▁sentence｜>S\n\n{DSML_TOOLS}<｜User｜>q<｜Assistant｜></think>"
        '¦\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="y" string="true">谢</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>'
        "¦<｜User｜><tool_result>1</tool_result>\n\n<tool_result>2</tool_result><｜Assistant｜></think>"
        "¦a<｜end▁of▁sentence｜>"
    ),
}

CALLS = Message("function", '[{"name": "f", "arguments": {"x": 1, "y": "谢"}}, {"name": "f", "arguments": {}}]')
RESULTS = [Message("observation", "1"), Message("observation", "2")]
Q, A = Message("user", "q"), Message("assistant", "a")


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_parallel_calls_and_results(name, wrapped):
    tools = f"[{WRAPPED if wrapped else TOOL_JSON}]"
    assert render(name, Conversation([Q, CALLS, *RESULTS, A], "S", tools)) == WITH_TOOLS[name]


@pytest.mark.parametrize("name", sorted({*template_names()} - {"gpt_oss", "gpt"}))
def test_a_call_that_is_no_json_is_kept_as_a_reply(name):
    call, reply = Message("function", "f(x)"), Message("assistant", "f(x)")
    rendered, as_reply = (render(name, Conversation([Q, m, RESULTS[0], A])) for m in (call, reply))
    assert rendered == as_reply
    assert "f(x)" in rendered.split("¦")[1]


def test_gpt_oss_needs_to_know_which_tool_answers():
    with pytest.raises(UserError, match="follows a reply that calls no tool"):
        render("gpt_oss", Conversation([Q, Message("function", "f(x)"), RESULTS[0], A]))


def test_results_go_to_their_calls():
    """Two results that came in another order: sorted where the format says so, named by their ids where it names."""
    calls = '[{"id": "1", "name": "f", "arguments": {}}, {"id": "2", "name": "g", "arguments": {}}]'
    results = [Message("observation", "of g", call_id="2"), Message("observation", "of f", call_id="1")]
    conversation = Conversation([Q, Message("function", calls), *results, A])
    assert "<tool_result>of f</tool_result>\n\n<tool_result>of g</tool_result>" in render("deepseek4", conversation)
    assert '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"of g"' in render("gpt_oss", conversation)
    # A question between two results stays where it is.
    mixed = Conversation([Q, Message("function", calls), results[0], Message("user", "and?"), results[1], A])
    assert "<tool_result>of f</tool_result>\n\nand?\n\n<tool_result>of g</tool_result>" in render("deepseek4", mixed)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("qwen3", f"Look.\n{QWEN_CALLS}<|im_end|>\n"),
        ("bailing_mini", f"Look.\n{QWEN_CALLS}<|role_end|>"),
        ("glm4", 'Look.<|assistant|>f\n{"x": 1, "y": "谢"}<|assistant|>f\n{}'),
        ("glm4_moe", f"\nLook.{GLM_CALLS}<|observation|>"),
        ("chatml", f"Look.\n{ACTIONS}<|im_end|>"),
        ("llama2", f" Look.\n{ACTIONS} </s>"),
        ("deepseek4", "Look.\n\n<｜DSML｜tool_calls>\n"),
        # The model's own template drops the text here, since a final reply follows; we keep it.
        ("gpt_oss", "<|channel|>commentary<|message|>Look.<|end|><|start|>assistant to=functions.f<|channel|>"),
    ],
)
def test_text_before_calls_is_kept(name, target):
    calls = Message("function", CALLS.content, preface="Look.")
    shown = render(name, Conversation([Q, calls, *RESULTS, A])).split("¦")[1]
    assert (
        shown.lstrip("\n").startswith(target.lstrip("\n"))
        if name in ("glm4", "deepseek4", "gpt_oss")
        else shown == target
    )
