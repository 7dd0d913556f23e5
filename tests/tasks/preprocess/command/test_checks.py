"""Flags against each other and against the handler; flags without effect say so in one line."""

from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.arguments import Arguments, flag_of
from mindspeed_llm.tasks.preprocess.command.checks import check_handler, check_mode, notices
from mindspeed_llm.tasks.preprocess.command.main import main
from mindspeed_llm.tasks.preprocess.command.parser import parse
from mindspeed_llm.tasks.preprocess.handler_flags import USED_BY
from mindspeed_llm.tasks.preprocess.handlers import HANDLERS
from tests.tasks.preprocess.command.toys import SFT, preprocess, toys

__all__ = ["toys"]
RUN = ["--input", "a", "--output-prefix", "b"]
# A value for every flag that belongs to some handlers only.
VALUES = {
    "json_keys": ["title"],
    "map_keys": ["{}"],
    "dataset_dir": ["folder"],
    "mix_strategy": ["interleave_under"],
    "interleave_probs": ["0.5,0.5", "--mix-strategy", "interleave_over"],
    "prompt_type": ["qwen3"],
    "prompt_type_path": ["file"],
    "enable_thinking": ["true"],
    "drop_thinking": ["false"],
    "reasoning_effort": ["max", "--enable-thinking", "true"],
    "mask_history": [],
    "pack": ["--seq-length", "10"],
    "neat_pack": ["--pack", "--seq-length", "10"],
    "append_eod": [],
    "pad_to_multiple_of": ["8"],
    "split_sentences": [],
    "keep_newlines": ["--split-sentences"],
    "dataset_additional_keys": ["labels"],
}
# The handlers that take the flag; the table of the interface, by hand.
INSTRUCTION = {name for name, handler in HANDLERS.items() if handler.kind == "instruction"}
PRETRAIN = {
    "GeneralPretrainHandler", "AlpacaPretrainHandler", "SharegptPretrainHandler", "StackOverflowPythonPretrainHandler",
}  # fmt: skip
LLAMA_FACTORY = {"LlamaFactoryInstructionHandler"}
TEMPLATED = {
    *LLAMA_FACTORY, "AlpacaStyleInstructionHandler", "SharegptStyleInstructionHandler", "OpenAIInstructionHandler",
    "HunyuanInstructionHandler", "AlpacaStylePairwiseHandler", "SharegptStylePairwiseHandler",
    "PPOAlpacaStyleInstructionHandler", "R1AlpacaStyleInstructionHandler", "R1SharegptStyleInstructionHandler",
}  # fmt: skip
EXPECTED = {
    "json_keys": {"GeneralPretrainHandler", "SharegptPretrainHandler"},
    "map_keys": set(HANDLERS) - LLAMA_FACTORY - {"GeneralPretrainHandler", "SharegptPretrainHandler"},
    "dataset_dir": LLAMA_FACTORY,
    "mix_strategy": LLAMA_FACTORY,
    "interleave_probs": LLAMA_FACTORY,
    "prompt_type": TEMPLATED,
    "prompt_type_path": TEMPLATED,
    "enable_thinking": TEMPLATED,
    "drop_thinking": TEMPLATED,
    "reasoning_effort": TEMPLATED,
    "mask_history": INSTRUCTION,
    "pack": INSTRUCTION,
    "neat_pack": INSTRUCTION,
    "append_eod": {name for name, handler in HANDLERS.items() if handler.kind != "prompt"},
    "pad_to_multiple_of": PRETRAIN,
    "split_sentences": PRETRAIN,
    "keep_newlines": PRETRAIN,
    "dataset_additional_keys": {"R1AlpacaStyleInstructionHandler", "R1SharegptStyleInstructionHandler"},
}


def test_the_tables_are_complete() -> None:
    assert USED_BY.keys() == VALUES.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", VALUES)
def test_which_handlers_take_a_flag(name: str) -> None:
    accepted = set()
    for handler in HANDLERS.values():
        dataset_dir = ["--dataset-dir", "x"] if not handler.formatting else []
        arguments = parse([*RUN, *dataset_dir, flag_of(name), *VALUES[name]])
        check_mode(arguments)
        try:
            check_handler(arguments, handler)
        except UserError as error:
            assert f"not for {handler.name}; leave it out, or choose one of " in str(error)
        else:
            accepted.add(handler.name)
    assert accepted == EXPECTED[name]


def test_a_default_that_is_written_out_is_no_mistake() -> None:
    arguments = parse([*RUN, "--json-keys", "text", "--enable-thinking", "none", "--mix-strategy", "concat"])
    for name in ("AlpacaStyleInstructionHandler", "GeneralPretrainHandler"):
        check_handler(arguments, HANDLERS[name])


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "--input is missing"),
        (["--input", "a"], "--output-prefix is missing"),
        (["--merge-group-keys", "k", "--output-prefix", "b"], "--input is missing"),
        (
            [*RUN[:2], "--output-prefix", "adir/"],
            "adir/ is a folder; add the beginning of the file names, e.g. adir/d",
        ),
        ([*RUN, "--num", "2"], "--num needs --inspect"),
        ([*RUN, "--html", "x"], "--html needs --inspect"),
        ([*RUN, "--streaming", "--n-subs", "2"], "which --streaming does not count"),
        (["--inspect", "p", "--merge-group-keys", "k"], "two different things"),
    ],
)
def test_combinations(argv: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        check_mode(parse(argv))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--handler-name", "LlamaFactoryInstructionHandler"], "needs --dataset-dir"),
        (["--handler-name", "AlpacaStyleInstructionHandlr"], "did you mean AlpacaStyleInstructionHandler"),
        ([*SFT, "--map-keys", "{'prompt': 'q'}"], "--map-keys: not valid JSON"),
        ([*SFT, "--map-keys", '{"promt": "q"}'], "did you mean 'prompt'"),
        ([*SFT, "--map-keys", '{"prompt": "instrction"}'], "did you mean 'instruction'"),
        ([*SFT, "--prompt-type", "qwen33"], "did you mean qwen3"),
        ([*SFT, "--pack"], "--pack needs --seq-length"),
        ([*SFT, "--neat-pack", "--seq-length", "9"], "--neat-pack needs --pack"),
        (["--keep-newlines"], "--keep-newlines needs --split-sentences"),
        (["--pack"], "--pack is for instruction handlers, not for GeneralPretrainHandler"),
        (["--neat-pack"], "--neat-pack is for instruction handlers, not for GeneralPretrainHandler"),
        (["--json-keys", "a/b"], "--json-keys 'a/b': the column is a part of the name of a file"),
        (
            ["--handler-name", "R1AlpacaStyleInstructionHandler", "--dataset-additional-keys", "input_ids"],
            "--dataset-additional-keys 'input_ids': the key is a part of the name of a file",
        ),
        (["--cache-dir", "x"], "--cache-dir is for data sets of the hub"),
        (["--tokenizer-name-or-path", "./nowhere"], "--tokenizer-name-or-path ./nowhere does not exist"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "--tokenizer-type GPT2BPETokenizer needs --vocab-file"),
    ],
)
@pytest.mark.usefixtures("toys")
def test_mistakes_of_a_run(argv: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        preprocess(*argv)
    assert words in str(error.value)
    assert not Path("out").exists()


def test_probabilities(toys: Path) -> None:
    (toys / "dataset_info.json").write_text('{"a": {"file_name": "alpaca.jsonl"}, "b": {"file_name": "alpaca.jsonl"}}')
    argv = ["--handler-name", "LlamaFactoryInstructionHandler", "--prompt-type", "qwen3", "--dataset-dir", "."]
    for more, words in (
        (["--interleave-probs", "0.5,0.5"], "needs --mix-strategy interleave_under or interleave_over, found concat"),
        (["--interleave-probs", "half", "--mix-strategy", "interleave_over"], "expected numbers separated by commas"),
        (["--interleave-probs", "1.0", "--mix-strategy", "interleave_over"], "2 data sets need as many numbers"),
    ):
        with pytest.raises(UserError) as error:
            preprocess(*argv, *more, source="a,b")
        assert words in str(error.value)


def test_flags_without_effect() -> None:
    assert notices(Arguments()) == []
    lines = notices(parse([*RUN, "--dataset-impl", "mmap", "--make-vocab-size-divisible-by", "64"]))
    assert lines == [
        "no effect from --make-vocab-size-divisible-by: the vocabulary is padded where the model is built; token ids "
        "stay as they are",
        "no effect from --dataset-impl: mmap is the one format of output",
    ]
    merging = parse([*RUN, "--merge-group-keys", "k", "--workers", "2", "--tokenizer-type", "PretrainedFromHF"])
    assert notices(merging) == [
        "no effect from --tokenizer-type, --workers with --merge-group-keys: parts are joined as they are"
    ]
    assert notices(parse(["--inspect", "p", "--num", "1", "--input", "x"])) == [
        "no effect from --input with --inspect: it only reads"
    ]


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--seed", "7"], "no effect from --seed: nothing is drawn at random"),
        (
            ["--prompt-type", "chatml", "--enable-thinking", "true"],
            "--enable-thinking: chatml is the template of models",
        ),
        (
            ["--prompt-type", "chatml", "--drop-thinking", "false"],
            "--drop-thinking: template chatml keeps all thoughts",
        ),
        (["--prompt-type", "qwen3", "--enable-thinking", "true", "--drop-thinking", "false"], ""),
        (["--merge-file", "x"], "no effect from --merge-file with --tokenizer-type PretrainedFromHF: other files are"),
    ],
)
@pytest.mark.usefixtures("toys")
def test_flags_without_effect_on_this_input(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(*SFT, *argv, "--check")
    shown = capsys.readouterr().out
    assert words in shown and ("no effect" in shown) == bool(words)


def test_inspect(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(*SFT)
    capsys.readouterr()
    main(["--inspect", "out/data", "--num", "1"])
    shown = capsys.readouterr().out
    assert "Say number 0." in shown and "Say number 1." not in shown
    main(["--inspect", "out/data", "--html", "page.html", "--tokenizer-name-or-path", "tok"])
    assert (toys / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
