"""Every template, every thinking rule and every way to write tools, as text written by hand from the formats' rules.

In the expected texts `¦` stands between source and target: source¦target¦source¦target.
"""

import json

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.layouts import RenderOptions, make_layout, piece_text
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import TEMPLATES_FILE, load_template, template_names


def render(name, conversation, *, one_turn=False, **options):
    template = load_template(name)
    eos = template.stop_words[0] if template.replace_eos else "</s>"
    parts = [
        piece_text(part, bos_token="<s>", eos_token=eos)
        for turn in make_layout(template, RenderOptions(**options)).pieces(conversation, one_turn=one_turn)
        for part in turn[:2]
    ]
    return "¦".join(parts)


def chat(*texts, system="", tools=""):
    return Conversation([Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)], system, tools)


CHATML = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n¦a<|im_end|>"
    "¦\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n¦b<|im_end|>"
)
# The line end behind the end mark belongs to the reply.
CHATML_LINE = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n¦a<|im_end|>\n"
    "¦<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n¦b<|im_end|>\n"
)
CHATGLM3 = "[gMASK]sop<|system|>\n S<|user|>\n q<|assistant|>¦\n a¦<|user|>\n r<|assistant|>¦\n b"
CHATGLM3_LEGACY = CHATGLM3.replace("\n ", "\n")
GLM4 = "[gMASK]<sop><|system|>\nS<|user|>\nq<|assistant|>¦\na¦<|user|>\nr<|assistant|>¦\nb"
USER_ASSISTANT = "<s>S\n\nUser: q\n\nAssistant:¦ a</s>¦User: r\n\nAssistant:¦ b</s>"
INST = "<s> [INST] S\n\nq [/INST]¦ a</s>¦ [INST] r [/INST]¦ b</s>"
INST_LEGACY = "<s>S[INST] q [/INST]¦a</s>¦[INST] r [/INST]¦b</s>"
GPT_OSS = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2025-06-28\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be "
    "included for every message.<|end|><|start|>developer<|message|># Instructions\n\nS\n\n<|end|>"
    "<|start|>user<|message|>q<|end|><|start|>assistant¦<|channel|>final<|message|>a<|end|>"
    "¦<|start|>user<|message|>r<|end|><|start|>assistant¦<|channel|>final<|message|>b<|return|>"
)
_R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> "
    "reasoning process here </think><answer> answer here </answer>Put your final answer within \\\\boxed{}. "
)

TWO_TURNS = {
    "chatglm2": "[gMASK]sopS[Round 1]\n\n问：q\n\n答：¦a¦\n\n[Round 2]\n\n问：r\n\n答：¦b",
    "chatglm2_legacy": "[gMASK]sopS[Round 0]\n\n问：q\n\n答：¦a¦\n\n[Round 1]\n\n问：r\n\n答：¦b",
    "chatglm3": CHATGLM3,
    "chatglm3_legacy": CHATGLM3_LEGACY,
    "chatglm3_system": CHATGLM3,
    "chatglm3_system_legacy": CHATGLM3_LEGACY,
    "glm4": GLM4,
    "glm4_moe": (
        "[gMASK]<sop><|system|>\nS<|user|>\nq<|assistant|>\n<think></think>¦\na<|user|>"
        "¦\nr<|assistant|>\n<think></think>¦\nb<|user|>"
    ),
    "glm4_moe_legacy": GLM4.replace("<|assistant|>", "<|assistant|><think>\n\n</think>\n\n"),
    "chatml": CHATML,
    "chatml_de": CHATML,
    "cpm": "<s>S<用户>q<AI>¦a</s>¦<用户>r<AI>¦b</s>",
    "default": "S\nHuman: q\nAssistant:¦a</s>¦\nHuman: r\nAssistant:¦b</s>",
    "empty": "Sq¦a¦r¦b",
    "trl": "<s>Sq¦a¦r¦b",
    "qwen_lf": CHATML_LINE,
    "qwen": CHATML,
    "qwen_r1": CHATML.replace("user\n", f"user\n{_R1}"),
    "qwen_math_r1": CHATML,
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nq"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n¦a<|eot_id|>¦<|start_header_id|>user"
        "<|end_header_id|>\n\nr<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n¦b<|eot_id|>"
    ),
    "mistral": INST,
    "mistral_legacy": INST_LEGACY,
    "mixtral": INST,
    "mixtral_legacy": INST_LEGACY,
    "magistral": (
        "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]q[/INST]<think>\n\n</think>\n\n¦a</s>"
        "¦[INST]r[/INST]<think>\n\n</think>\n\n¦b</s>"
    ),
    "gemma": (
        "<s><start_of_turn>user\nS\n\nq<end_of_turn>\n<start_of_turn>model\n¦a<end_of_turn>\n"
        "¦<start_of_turn>user\nr<end_of_turn>\n<start_of_turn>model\n¦b<end_of_turn>\n"
    ),
    "gemma_legacy": (
        "<s>S<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n¦a"
        "¦<end_of_turn>\n<start_of_turn>user\nr<end_of_turn>\n<start_of_turn>model\n¦b"
    ),
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nq [/INST]¦ a </s>¦<s>[INST] r [/INST]¦ b </s>",
    "llama2_legacy": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nq [/INST]¦a</s>¦<s>[INST] r [/INST]¦b</s>",
    "alpaca": "S### Instruction:\nq\n\n### Response:\n¦a</s>¦\n\n### Instruction:\nr\n\n### Response:\n¦b</s>",
    "deepseek2": USER_ASSISTANT,
    "deepseek2_legacy": USER_ASSISTANT.replace("¦ ", "¦"),
    "deepseek2-lite": USER_ASSISTANT,
    "deepseek2-lite_legacy": USER_ASSISTANT.replace("¦ ", "¦"),
    "minicpm3": CHATML_LINE,
    "minicpm3_legacy": USER_ASSISTANT.replace("¦ ", "¦"),
    "baichuan2": "S<reserved_106>q<reserved_107>¦a¦<reserved_106>r<reserved_107>¦b",
    "deepseek3": "<s>S<｜User｜>q<｜Assistant｜>¦a</s>¦<｜User｜>r<｜Assistant｜>¦b</s>",
    "intern2": f"<s>{CHATML_LINE}",
    "hunyuan": "<|startoftext|>S<|extra_4|>q<|extra_0|>¦a<|eos|>¦<|startoftext|>r<|extra_0|>¦b<|eos|>",
    "hunyuan_legacy": "Sq¦a¦r¦b",
    "qwen3": CHATML_LINE.replace("¦b", "<think>\n\n</think>\n\n¦b"),
    "qwen3_legacy": CHATML_LINE.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n"),
    "bailing_mini": (
        "<role>SYSTEM</role>S\ndetailed thinking off<|role_end|><role>HUMAN</role>q<|role_end|><role>ASSISTANT</role>"
        "¦a<|role_end|>¦<role>HUMAN</role>r<|role_end|><role>ASSISTANT</role>¦b<|role_end|>"
    ),
    "bailing_mini_legacy": (
        "<role>SYSTEM</role>S<|role_end|><role>HUMAN</role>q<|role_end|><role>ASSISTANT</role>"
        "¦a<|role_end|>¦<role>HUMAN</role>r<|role_end|><role>ASSISTANT</role>¦b<|role_end|>"
    ),
    "plm": CHATML_LINE,
    "gpt_oss": GPT_OSS,
    "gpt": GPT_OSS,
    "gpt_oss_legacy": (
        "<|start|>system<|message|>S<|end|><|start|>user<|message|>q<|end|><|start|>assistant<|channel|>analysis"
        "<|message|><|end|><|start|>assistant<|channel|>final<|message|>¦a<|end|>¦<|start|>user<|message|>r<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>¦b<|end|>"
    ),
    "deepseek4": (
        "<｜begin▁of▁sentence｜>S<｜User｜>q<｜Assistant｜></think>¦a<｜end▁of▁sentence｜>"
        "¦<｜User｜>r<｜Assistant｜></think>¦b<｜end▁of▁sentence｜>"
    ),
}


@pytest.mark.parametrize("name", template_names())
def test_two_turns_with_a_system_text(name):
    assert render(name, chat("q", "a", "r", "b", system="S")) == TWO_TURNS[name]


def test_the_names():
    """The 34 names of the Ascend stack, the name of the FSDP2 backend, and a legacy layout where it differs."""
    given = {
        *("chatglm2", "chatglm3", "chatglm3_system", "glm4", "glm4_moe", "chatml", "chatml_de", "cpm", "default"),
        *("empty", "trl", "qwen_lf", "qwen", "qwen_r1", "qwen_math_r1", "llama3", "mistral", "mixtral", "magistral"),
        *("gemma", "llama2", "alpaca", "deepseek2", "deepseek2-lite", "minicpm3", "baichuan2", "deepseek3", "intern2"),
        *("hunyuan", "qwen3", "bailing_mini", "plm", "gpt_oss", "deepseek4"),
    }
    assert len(given) == 34
    legacy = {name for name in template_names() if name.endswith("_legacy")}
    assert set(template_names()) - legacy == {*given, "gpt"}
    for name in legacy:
        assert TWO_TURNS[name] != TWO_TURNS[name.removesuffix("_legacy")]
    with pytest.raises(UserError, match=r"data\.template: 'qwen33' is not a template; did you mean 'qwen3'\?"):
        load_template("qwen33")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatglm3_system", "You are ChatGLM3, a large language model trained by Zhipu.AI. "),
        ("chatml_de", "Du bist ein freundlicher und hilfsbereiter KI-Assistent."),
        ("qwen_lf", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        ("qwen", "system\nYou are a helpful assistant.<|im_end|>"),
        ("qwen_math_r1", "Please reason step by step, and put your final answer within \\boxed{}."),
        ("magistral", "[SYSTEM_PROMPT]system_prompt\n\nA user will ask you to solve a task. "),
        ("alpaca", "Below is an instruction that describes a task. Write a response that appropriately completes the "),
        ("gpt_oss_legacy", "system<|message|>You are ChatGPT, a large language model trained by OpenAI.<|end|>"),
        ("hunyuan", "<|startoftext|>You are a helpful assistant.<|extra_4|>q"),
        ("bailing_mini", "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>q"),
    ],
)
def test_system_text_where_the_record_has_none(name, text):
    assert text in render(name, chat("q", "a")).split("¦")[0]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "glm4", "deepseek3", "deepseek4", "gemma", "llama2", "mistral"])
def test_no_system_text_no_block(name):
    assert render(name, chat("q", "a", "r", "b")).startswith(
        {
            "llama3": "<s><|start_header_id|>user<",
            "qwen3": "<|im_start|>user\nq",
            "glm4": "[gMASK]<sop><|user|>\nq",
            "deepseek3": "<s><｜User｜>q",
            "deepseek4": "<｜begin▁of▁sentence｜><｜User｜>q",
            "gemma": "<s><start_of_turn>user\nq",
            "llama2": "<s>[INST] q",
            "mistral": "<s> [INST] q",
        }[name]
    )


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
EMPTY = "<think>\n\n</think>\n\n"

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
        GPT_OSS.split("<|end|><|start|>developer")[0]
        + "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
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


THOUGHT = "<think>\nT\n</think>\n\n"
OPEN_GLM, OPEN_LING = "\n<think>T</think>", "\n<think>\nT\n</think>\n\n"
NO_GLM = "\n<think></think>"

# (source end of turn 1, target of turn 1, source end of turn 2, target of turn 2) for replies "<think>T</think>a" and
# "b", and for "a" and "<think>T</think>b".
RULES = [
    ("qwen3", True, ("", "a", "", f"{EMPTY}b"), ("", "a", "", f"{THOUGHT}b")),
    ("qwen3", False, ("", "a", EMPTY, "b"), ("", "a", EMPTY, "b")),
    ("qwen3", None, ("", "a", EMPTY, "b"), ("", "a", "", f"{THOUGHT}b")),
    ("qwen3_legacy", True, ("", f"{THOUGHT}a", "", f"{EMPTY}b"), ("", f"{EMPTY}a", "", f"{THOUGHT}b")),
    ("qwen3_legacy", False, (EMPTY, "a", EMPTY, "b"), (EMPTY, "a", EMPTY, "b")),
    ("qwen3_legacy", None, ("", f"{THOUGHT}a", EMPTY, "b"), (EMPTY, "a", "", f"{THOUGHT}b")),
    ("glm4_moe", True, ("", f"{NO_GLM}\na", "", f"{NO_GLM}\nb"), ("", f"{NO_GLM}\na", "", f"{OPEN_GLM}\nb")),
    ("glm4_moe", False, (NO_GLM, "\na", NO_GLM, "\nb"), (NO_GLM, "\na", NO_GLM, "\nb")),
    ("glm4_moe", None, (NO_GLM, "\na", NO_GLM, "\nb"), (NO_GLM, "\na", "", f"{OPEN_GLM}\nb")),
    ("glm4_moe_legacy", True, ("", f"\n{THOUGHT}a", "", f"{EMPTY}\nb"), ("", f"{EMPTY}\na", "", f"\n{THOUGHT}b")),
    ("glm4_moe_legacy", False, (EMPTY, "\na", EMPTY, "\nb"), (EMPTY, "\na", EMPTY, "\nb")),
    ("glm4_moe_legacy", None, ("", f"\n{THOUGHT}a", EMPTY, "\nb"), (EMPTY, "\na", "", f"\n{THOUGHT}b")),
    ("magistral", True, ("", f"{THOUGHT}a", "", f"{EMPTY}b"), ("", f"{EMPTY}a", "", f"{THOUGHT}b")),
    ("magistral", False, (EMPTY, "a", EMPTY, "b"), (EMPTY, "a", EMPTY, "b")),
    ("bailing_mini", True, ("", "a", "", "b"), ("", "a", "", f"{OPEN_LING}b")),
    ("bailing_mini", False, ("", "a", "", "b"), ("", "a", "", "b")),
    ("bailing_mini", None, ("", "a", "", "b"), ("", "a", "", f"{OPEN_LING}b")),
    ("deepseek4", True, ("</think>", "a", "<think>", "</think>b"), ("</think>", "a", "<think>", "T</think>b")),
    ("deepseek4", False, ("</think>", "a", "</think>", "b"), ("</think>", "a", "</think>", "b")),
    ("deepseek4", None, ("</think>", "a", "</think>", "b"), ("</think>", "a", "</think>", "b")),
    # A template of a model that does not reason keeps the tags as the text that they are.
    ("qwen", True, ("", f"{THOUGHT}a", "", "b"), ("", "a", "", f"{THOUGHT}b")),
    ("qwen", False, ("", f"{THOUGHT}a", "", "b"), ("", "a", "", f"{THOUGHT}b")),
]
OPENS = {
    "qwen": "assistant\n",
    "magistral": "[/INST]",
    "deepseek4": "<｜Assistant｜>",
    "bailing_mini": "ASSISTANT</role>",
}


@pytest.mark.parametrize("in_field", [False, True], ids=["text", "field"])
@pytest.mark.parametrize(("name", "enable_thinking", "first", "last"), RULES)
def test_thinking_rules(name, enable_thinking, first, last, in_field):
    for thoughtful, expected in enumerate((first, last)):
        replies = [Message("assistant", text) for text in "ab"]
        replies[thoughtful] = (
            Message("assistant", "ab"[thoughtful], reasoning="T")
            if in_field
            else Message("assistant", THOUGHT + "ab"[thoughtful])
        )
        conversation = Conversation([Q, replies[0], Message("user", "r"), replies[1]])
        parts = render(name, conversation, enable_thinking=enable_thinking).split("¦")
        opening = next((v for k, v in OPENS.items() if name.startswith(k)), "<|assistant|>")
        ends = {"qwen3": "<|im_end|>\n", "qwen": "<|im_end|>", "glm4_moe": "<|user|>", "bailing_mini": "<|role_end|>"}
        end = {"magistral": "</s>", "deepseek4": "<｜end▁of▁sentence｜>", "glm4_moe_legacy": ""}.get(
            name, ends.get(name.removesuffix("_legacy"))
        )
        shown = [parts[0].split(opening)[-1], parts[1], parts[2].split(opening)[-1], parts[3]]
        assert shown == [expected[0], expected[1] + end, expected[2], expected[3] + end]


@pytest.mark.parametrize("name", ["qwen3", "glm4_moe", "bailing_mini", "gpt_oss", "deepseek4"])
def test_thoughts_of_earlier_turns_can_be_kept(name):
    first = Message("assistant", "a", reasoning="old thought")
    conversation = Conversation([Q, first, Message("user", "r"), Message("assistant", "b", reasoning="new thought")])
    dropped, kept = (render(name, conversation, enable_thinking=True, drop_thinking=drop) for drop in (True, False))
    assert "old thought" not in dropped and "new thought" in dropped
    assert "old thought" in kept.split("¦")[1] and "new thought" in kept.split("¦")[3]


def test_glm_marks_questions_when_thinking_is_off():
    text = render("glm4_moe", chat("q", "a", "r/nothink", "b"), enable_thinking=False)
    assert "q/nothink<|assistant|>" in text and "r/nothink<|assistant|>" in text


@pytest.mark.parametrize(
    "content", ["<think>a</think>b<think>c</think>d", "say <think>a</think>b", "<think>a", "a</think>b</think>c"]
)
def test_think_tags_that_are_no_single_leading_thought_are_text(content):
    assert render("qwen3", chat("q", content)).endswith(f"{EMPTY}¦{content}<|im_end|>\n")


def test_gpt_oss_thoughts():
    """In channels, in tags or in a field: a message of channel analysis; calls that a final reply follows have none."""
    channels = "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>final<|message|>a"
    expected = f"{channels}<|return|>"
    for reply in (
        Message("assistant", channels),
        Message("assistant", f"{THOUGHT}a"),
        Message("assistant", "a", reasoning="T"),
    ):
        assert render("gpt_oss", Conversation([Q, reply])).split("¦")[1] == expected
        off = render("gpt_oss", Conversation([Q, reply]), enable_thinking=False)
        assert off.split("¦")[1] == "<|channel|>final<|message|>a<|return|>"
    call = Message("function", '{"name": "f", "arguments": {}}', reasoning="T")
    shown = "<|channel|>analysis<|message|>T<|end|><|start|>assistant to=functions.f"
    assert render("gpt_oss", Conversation([Q, call])).split("¦")[1].startswith(shown)
    final = render("gpt_oss", Conversation([Q, call, RESULTS[0], A]))
    assert final.split("¦")[1].startswith(" to=functions.f")


def test_efforts():
    assert "Reasoning: high\n" in render("gpt_oss", chat("q", "a"), reasoning_effort="high")
    text = render("deepseek4", chat("q", "a", system="S"), enable_thinking=True, reasoning_effort="max")
    assert text.startswith("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum with no shortcuts permitted.\n")
    assert "is left unchecked.\n\nS<｜User｜>q<｜Assistant｜><think>¦</think>a" in text
    plain = render("deepseek4", chat("q", "a"), enable_thinking=True)
    assert render("deepseek4", chat("q", "a"), enable_thinking=True, reasoning_effort="high") == plain
    with pytest.raises(UserError, match="in thinking mode only; set enable_thinking to true"):
        render("deepseek4", chat("q", "a"), reasoning_effort="max")


@pytest.mark.parametrize(
    ("name", "enable_thinking", "end"),
    [
        ("qwen3", None, "assistant\n"),
        ("qwen3", True, "assistant\n"),
        ("qwen3", False, f"assistant\n{EMPTY}"),
        ("qwen3_legacy", False, f"assistant\n{EMPTY}"),
        ("glm4_moe", False, f"/nothink<|assistant|>{NO_GLM}"),
        ("glm4_moe", True, "<|assistant|>"),
        ("bailing_mini", False, "<role>ASSISTANT</role>"),
        ("gpt_oss", None, "<|start|>assistant"),
        ("deepseek4", True, "<｜Assistant｜><think>"),
        ("deepseek4", None, "<｜Assistant｜></think>"),
        ("llama2", None, " [/INST]"),
        ("empty", None, "r"),
    ],
)
def test_prompts_end_where_the_model_begins(name, enable_thinking, end):
    conversation = chat("q", f"{THOUGHT}a", "r")
    parts = render(name, conversation, one_turn=True, enable_thinking=enable_thinking).split("¦")
    assert parts[-1] == "" and parts[-2].endswith(end)
    # The thought of an earlier reply is left out of a prompt, in the legacy layouts too.
    assert ("T\n" in parts[1]) == (name in ("llama2", "empty"))


def test_upstream_files_can_be_read(tmp_path):
    """The file of the Ascend stack itself works: its classes, its unused key, tool formats that it misspells."""
    entries = [
        {
            "name": "mine",
            "template_class": "Llama2Template",
            "format_user": {"slots": [["bos_token"], "[INST] {{content}} [/INST]"]},
            "format_system": {"slots": ["<<SYS>>\n{{content}}\n<</SYS>>\n\n"]},
            "format_tools": {"tool_format": "glm4"},
            "force_system": True,
        },
        {"name": "lf", "template_class": "LFDefaultTemplate", "format_separator": {"slots": ["\n"]}},
    ]
    file = tmp_path / "templates.json"
    file.write_text(json.dumps(entries), encoding="utf-8")
    layout = make_layout(load_template("mine", file), RenderOptions())
    (source, target, _), *_ = layout.pieces(chat("q", "a", system="S"))
    assert (
        piece_text([*source, *target], bos_token="<s>", eos_token="</s>")
        == "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nq [/INST]a</s>"
    )
    assert load_template("lf", file).separator.pieces == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"name": "a", "format_usr": {}}]', "template 'a': unknown keys format_usr; expected some of .*format_user"),
        ('[{"name": "a", "template_class": "X"}]', "template 'a': template_class 'X'; expected one of Template, "),
        ('{"name": "a"}', "expected a JSON list of objects with a name"),
        ("[", "expected a JSON list of objects with a name"),
        (None, "No such file"),
    ],
)
def test_mistakes_in_a_templates_file(tmp_path, content, message):
    file = tmp_path / "templates.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_template("a", file)


def test_shipped_file_lists_every_template_once():
    names = [entry["name"] for entry in json.loads(TEMPLATES_FILE.read_text(encoding="utf-8"))]
    assert len(names) == len(set(names)) == len(template_names())
