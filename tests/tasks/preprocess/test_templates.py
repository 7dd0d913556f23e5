"""Every template on a conversation of two turns, as text written by hand from the formats' rules; reading the file."""

import json

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.layouts import RenderOptions, make_layout, piece_text
from mindspeed_llm.tasks.preprocess.templates import TEMPLATES_FILE, load_template, template_names
from tests.tasks.preprocess.renderings import chat, render

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
