"""Renderings and loss masks against the golden renderings that lie beside the checkout; skipped where they do not."""

import itertools
import json
from pathlib import Path

import pytest

from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import FORMATS, SHAREGPT_TAGS, to_conversation
from mindspeed_llm.tasks.preprocess.render import TemplateRenderer, piece_text
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX, SampleOptions, build_sample
from mindspeed_llm.tasks.preprocess.templates import load_template, template_names
from tests.support.tokenizers import byte_tokenizer

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "data" / "reference" / "chat_golden.jsonl"

# The golden file was made by the Megatron stack, which calls the template of this backend's `gpt` by another name.
_NAMES = {"gpt_oss": "gpt"}
# Lines that record a defect: the text of a call that is no JSON is lost, wrapped tools vanish. See test_render.py.
_DEFECTS = {"function_not_json", "tools_openai_wrapped"}
_SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|start|>", "<|message|>", "<|end|>", "<|channel|>",
)  # fmt: skip


def _rows():
    if not GOLDEN.is_file():
        return []
    shipped = set(template_names())
    rows = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    return [
        row
        for row in rows
        if _NAMES.get(row["template"], row["template"]) in shipped
        and row.get("mode") is None
        and not row.get("upstream_error")
        and row["case"] not in _DEFECTS
    ]


def _conversation(row):
    formatting = "alpaca" if row["handler"].startswith("Alpaca") else "sharegpt"
    columns = dict(FORMATS[formatting].columns)
    return to_conversation(Record(GOLDEN, 1, row["record"]), formatting, columns, SHAREGPT_TAGS)


@pytest.mark.skipif(not GOLDEN.is_file(), reason="no golden renderings beside the checkout")
def test_enough_rows_are_compared():
    assert len(_rows()) >= 60


@pytest.mark.parametrize("row", _rows(), ids=lambda row: f"{row['template']}-{row['case']}-{row['enable_thinking']}")
def test_text_ids_and_loss_spans(row):
    template = load_template(_NAMES.get(row["template"], row["template"]))
    tokenizer = byte_tokenizer(_SPECIALS)
    renderer = TemplateRenderer(template, tokenizer, enable_thinking=row["enable_thinking"])
    conversation = _conversation(row)

    assert [(m.role, m.content) for m in conversation.messages] == [(m["role"], m["content"]) for m in row["messages"]]
    pairs = [
        [piece_text(part, bos_token=row["bos_token"], eos_token=row["eos_token"]) for part in (source, target)]
        for source, target, _ in renderer.pieces(conversation)
    ]
    assert pairs == row["rendered_pairs"]

    turns = renderer.turns(conversation)
    ids, labels = build_sample(turns, SampleOptions(cutoff_len=100_000), renderer.efficient_eos_id)
    assert tokenizer.decode(ids) == row["full_text"]
    runs = [
        tokenizer.decode([token for _, token in group])
        for has_loss, group in itertools.groupby(enumerate(labels), key=lambda item: item[1] != IGNORE_INDEX)
        if has_loss
    ]
    assert runs == row["loss_text_spans"]
    differing = [
        [tokenizer.decode([a]), tokenizer.decode([b])]
        for a, b in zip(ids, labels, strict=True)
        if b not in (IGNORE_INDEX, a)
    ]
    assert differing == row.get("label_differs_from_input", [])
