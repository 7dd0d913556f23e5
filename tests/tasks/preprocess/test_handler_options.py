"""Options that a handler cannot follow are refused, naming the flag."""

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.handlers import WorkOptions, find_handler, make_work
from tests.tasks.preprocess.pieces import bpe_tokenizer, run
from tests.tasks.preprocess.test_handlers import HUNYUAN_TEMPLATE


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "GeneralInstructionHandler",
            {"prompt_type": "qwen3"},
            "--prompt-type is for handlers that take a template, not for GeneralInstructionHandler; leave it out",
        ),
        (
            "GeneralPretrainHandler",
            {"prompt_type": "qwen3"},
            "--prompt-type is for handlers that take a template, not for GeneralPretrainHandler; leave it out",
        ),
        (
            "AlpacaStyleInstructionHandler",
            {},
            r"--handler-name AlpacaStyleInstructionHandler needs a chat template, .* by --prompt-type \(.*qwen3",
        ),
        ("AlpacaStyleInstructionHandler", {"prompt_type": "qwn3"}, "--prompt-type 'qwn3': .* did you mean qwen3"),
        (
            "AlpacaStyleInstructionHandler",
            {"split_sentences": True},
            "--split-sentences is for pretraining handlers, not for Alpaca",
        ),
        (
            "AlpacaStylePairwiseHandler",
            {"mask_history": True},
            "--mask-history is for instruction handlers, not for AlpacaStylePair",
        ),
        (
            "PPOAlpacaStyleInstructionHandler",
            {"append_eod": True},
            "--append-eod is for all but the prompt handlers, not for PPO",
        ),
        (
            "AlpacaStyleInstructionHandler",
            {"additional_keys": ("x",)},
            "--dataset-additional-keys is for the R1 handlers, not for Alpaca",
        ),
        (
            "AlpacaStyleInstructionHandler",
            {"prompt_type": "gpt_oss", "reasoning_effort": "max"},
            "--reasoning-effort max: template 'gpt_oss' knows low, medium, high",
        ),
        (
            "AlpacaStyleInstructionHandler",
            {"prompt_type": "deepseek4", "reasoning_effort": "max"},
            "--reasoning-effort max needs --enable-thinking true with template 'deepseek4'",
        ),
        (
            "AlpacaStyleInstructionHandler",
            {"prompt_type": "chatml", "reasoning_effort": "high"},
            "--reasoning-effort high: template 'chatml' knows none, leave it out",
        ),
        (
            "AlpacaPretrainHandler",
            {"json_keys": ("a", "b")},
            "--json-keys is for handlers that tokenize plain columns, not for AlpacaP",
        ),
    ],
)
def test_options_that_do_not_fit(name, options, message):
    with pytest.raises(UserError, match=message):
        make_work(find_handler(name), bpe_tokenizer(), WorkOptions(**options))


def test_missing_columns_of_plain_text_name_their_flag():
    record = {"body": "x"}
    with pytest.raises(UserError, match=r"no key 'text' .* with --json-keys, or under `columns` of the data set"):
        run("GeneralPretrainHandler", bpe_tokenizer(), record)


def test_what_the_tokenizers_own_template_cannot_follow():
    tokenizer = bpe_tokenizer(chat_template=HUNYUAN_TEMPLATE)
    handler = find_handler("OpenAIInstructionHandler")
    for options in ({"drop_thinking": False}, {"reasoning_effort": "max"}):
        with pytest.raises(UserError, match=r"--(drop-thinking|reasoning-effort) needs --prompt-type"):
            make_work(handler, tokenizer, WorkOptions(**options))
