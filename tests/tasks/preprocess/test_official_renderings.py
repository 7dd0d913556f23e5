"""Our text equals that of the models' published chat templates, run through transformers.

`official_renderings.json` holds conversations, and the text that each published template gave for them. Where the
two differ by the end mark alone, `ENDS` says how and why.
"""

import json
from pathlib import Path

import pytest

from mindspeed_llm.tasks.preprocess.layouts import RenderOptions, make_layout, piece_text
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import load_template

_FIXTURE = json.loads((Path(__file__).parent / "official_renderings.json").read_text(encoding="utf-8"))
_ROWS = _FIXTURE["renderings"]

ENDS = {
    # The line end after the last reply's end mark separates turns; nothing stands after the last one.
    "chatml": ("", "\n"),
    "qwen": ("", "\n"),
    # A reply ends where the next turn is marked: that mark is what the model writes to stop.
    "glm4_moe": ("<|user|>", ""),
}
"""Template -> (what only our text has at its end, what only the published one has)."""

# The tokenizer of ChatGLM2 puts these two tokens in front of every text, its template does not write them.
_PREFIXES = {"chatglm2": "[gMASK]sop"}
_NO_SYSTEM = {"gemma", "chatglm2"}


def _conversation(row):
    case = _FIXTURE["conversations"][row["case"]]
    system = "" if row["template"] in _NO_SYSTEM else case.get("system", "")
    return Conversation([Message(**message) for message in case["messages"]], system, case.get("tools", ""))


def _turns(row):
    """Text of source and target of each turn."""
    template = load_template(row["template"]).with_options(tool_format=row.get("tool_format"))
    eos = template.stop_words[0] if template.replace_eos else row.get("eos_token", "</s>")
    conversation = _conversation(row)
    layout = make_layout(template, RenderOptions(**row.get("options", {})))
    is_prompt = conversation.messages[-1].role in ("user", "observation")
    return is_prompt, [
        tuple(piece_text(part, bos_token=row.get("bos_token", "<s>"), eos_token=eos) for part in turn[:2])
        for turn in layout.pieces(conversation, one_turn=is_prompt)
    ]


def _id(row):
    options = "-".join(f"{name}={value}" for name, value in row.get("options", {}).items())
    return "-".join(filter(None, (row["template"], row["case"], options)))


@pytest.mark.parametrize("row", _ROWS, ids=_id)
def test_text_equals_the_published_template(row):
    is_prompt, turns = _turns(row)
    ours = "".join(source + target for source, target in turns)
    our_end, their_end = ("", "") if is_prompt else ENDS.get(row["template"], ("", ""))
    if row["case"] == "ends_in_call":
        our_end = our_end.replace("user", "observation")
    assert ours + their_end == _PREFIXES.get(row["template"], "") + row["text"] + our_end


@pytest.mark.parametrize("row", [row for row in _ROWS if "trained" in row], ids=_id)
def test_targets_are_the_spans_that_the_training_template_marks(row):
    _, turns = _turns(row)
    assert [target for _, target in turns] == row["trained"]


def test_every_family_and_kind_of_conversation_is_there():
    assert {row["template"] for row in _ROWS} >= {
        *("qwen", "qwen3", "qwen_lf", "llama2", "llama3", "gemma", "glm4", "glm4_moe", "gpt_oss", "bailing_mini"),
        *("mistral", "deepseek2", "deepseek3", "deepseek4", "chatglm2", "chatglm3", "minicpm3", "intern2", "hunyuan"),
    }
    for template in ("qwen3", "glm4_moe", "bailing_mini"):
        cases = {row["case"] for row in _ROWS if row["template"] == template}
        assert cases == set(_FIXTURE["conversations"]), template
