"""From argv to `Config`: precedence, value syntax, and a table of mistakes with their messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config import Config, dump_yaml, parse_command_line, resolved_dict
from mindspeed_llm.fsdp2.config.checks import value_of

REQUIRED = ["--model.model_name_or_path", "m", "--training.output_dir", "o"]
BASE = "model:\n  model_name_or_path: m\ntraining:\n  output_dir: o\n"


def parse(*argv: str) -> Config:
    return parse_command_line(list(argv)).config


@pytest.mark.parametrize(
    ("key", "yaml_text", "option", "from_yaml", "from_option"),
    [
        ("training.lr", "1e-5", ["2e-4"], 1e-5, 2e-4),
        ("training.max_steps", "10", ["-1"], 10, -1),
        ("training.seed", "1", ["7"], 1, 7),
        ("training.stage", "pt", ["sft"], "pt", "sft"),
        ("training.num_train_epochs", "2", ["0.5"], 2.0, 0.5),
        ("training.disable_shuffling", "1", ["false"], True, False),
        ("parallel.recompute", "false", ["True"], False, True),
        ("parallel.recompute", "No", ["y"], False, True),
        ("parallel.recompute", "yes", ["n"], True, False),
        ("parallel.recompute", "T", ["0"], True, False),
        ("data.template", "qwen3", ["null"], "qwen3", None),
        ("data.template", "null", ["gpt"], None, "gpt"),
        ("data.enable_thinking", "null", ["true"], None, True),
        ("data.enable_thinking", "false", ["null"], False, None),
        ("data.max_samples", "5", ["null"], 5, None),
        ("data.interleave_probs", "'0.5,0.5'", ["0.1,0.9"], "0.5,0.5", "0.1,0.9"),
        (
            "data.dataset",
            "{file_name: a.jsonl}",
            ['{"file_name": "b.jsonl"}'],
            {"file_name": "a.jsonl"},
            {"file_name": "b.jsonl"},
        ),
        ("data.dataset", "a,b", ["c"], "a,b", "c"),
        ("data.dataset", "[a, b]", ["c", "d"], ["a", "b"], ["c", "d"]),
        ("parallel.fsdp_modules", "[a, b]", ["c"], ["a", "b"], ["c"]),
        ("parallel.ignored_modules", "[a]", ["null"], ["a"], None),
        ("training.profile_ranks", "[0, 1]", ["2", "3"], [0, 1], [2, 3]),
        ("parallel.fsdp_size", "null", ["4"], None, 4),
    ],
)
def test_option_wins_over_yaml_wins_over_default(
    write_yaml: Callable[[str], Path], key: str, yaml_text: str, option: list[str], from_yaml: Any, from_option: Any
) -> None:
    section, name = key.split(".")
    document = yaml.safe_load(BASE)
    text = "".join(
        f"{other}:\n"
        + "".join(f"  {field}: {value}\n" for field, value in document.get(other, {}).items())
        + (f"  {name}: {yaml_text}\n" if other == section else "")
        for other in sorted({*document, section})
    )
    path = str(write_yaml(text))
    for config, expected in (
        (parse(path), from_yaml),
        (parse(path, f"--{key}", *option), from_option),
        (parse(path, f"--{key}", *option, "--training.logging_steps", "3"), from_option),
        (parse(path, "--training.logging_steps", "3", f"--{key}", *option), from_option),
    ):
        assert value_of(config, key) == expected
        assert type(value_of(config, key)) is type(expected)
    if len(option) == 1:
        assert value_of(parse(path, f"--{key}={option[0]}"), key) == from_option


@pytest.mark.parametrize("tail", [[], ["--training.logging_steps", "2"], ["--check"]])
def test_bare_boolean_option_wins_over_yaml_wherever_it_stands(
    write_yaml: Callable[[str], Path], tail: list[str]
) -> None:
    path = write_yaml(BASE + "  profile: false\n")
    assert parse(str(path), "--training.profile", *tail).training.profile is True


def test_last_of_equal_options_counts() -> None:
    assert parse(*REQUIRED, "--training.seed", "1", "--training.seed=2").training.seed == 2


def test_value_may_hold_equal_signs_and_start_with_a_dash() -> None:
    config = parse(*REQUIRED, "--data.default_system=--a=b", "--data.tool_format", "-x", "--data.template", "{x")
    assert config.data.default_system == "--a=b"
    assert config.data.tool_format == "-x"
    assert config.data.template == "{x"


def test_everything_by_options_and_everything_by_yaml(write_yaml: Callable[[str], Path]) -> None:
    by_options = parse_command_line(REQUIRED)
    assert by_options.config_file is None
    path = write_yaml(BASE)
    by_yaml = parse_command_line([str(path)])
    assert by_yaml.config_file == path
    assert by_yaml.config == by_options.config


def test_torchrun_style_command(write_yaml: Callable[[str], Path]) -> None:
    config = parse(str(write_yaml(BASE)), "--training.output_dir", "./output")
    assert config.training.output_dir == "./output"


@pytest.mark.parametrize("position", [0, 1, 3])
def test_switches_stand_anywhere(write_yaml: Callable[[str], Path], position: int) -> None:
    argv = [str(write_yaml(BASE)), "--training.seed", "3"]
    argv[position:position] = ["--check"]
    invocation = parse_command_line(argv)
    assert (invocation.check_only, invocation.debug, invocation.config.training.seed) == (True, False, 3)


def test_debug_switch() -> None:
    assert parse_command_line([*REQUIRED, "--debug"]).debug is True


def test_defaults_of_two_configurations_are_not_shared() -> None:
    first, second = parse(*REQUIRED), parse(*REQUIRED)
    first.parallel.fsdp_modules.append("x")
    assert "x" not in second.parallel.fsdp_modules
    assert "x" not in parse(*REQUIRED).parallel.fsdp_modules


def test_resolved_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = parse(
        *REQUIRED, "--data.dataset", '{"file_name": "a.jsonl", "columns": {"prompt": "q"}}', "--data.template", "1e5",
        "--data.enable_thinking", "null", "--training.lr", "1e-7", "--parallel.ignored_modules", "a.{*}", "b",
        "--data.default_system", "yes", "--model.add_tokens", "<a>,<b>",
    )  # fmt: skip
    path = tmp_path / "run_config.yaml"
    path.write_text(dump_yaml(resolved_dict(config)))
    assert parse(str(path)) == config


def test_tokens_are_neither_written_nor_shown() -> None:
    config = parse(*REQUIRED, "--model.hf_hub_token", "secret-1")
    assert config.model.hf_hub_token == "secret-1"
    assert resolved_dict(config)["model"]["hf_hub_token"] is None
    assert "secret-1" not in repr(config)
    with pytest.raises(UserError) as error:
        parse(*REQUIRED, "--model.hf_hub_token", "secret-1", "secret-2")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        # unknown names
        ("training:\n  learning_rate: 1\n", ["line 2", "training.learning_rate", "training.lr?"]),
        ("training:\n  learning_rat: 1\n", ["training.lr?"]),
        ("training:\n  finetuning_type: lora\n", ["line 2", "training.finetuning_type", "model.lora_rank"]),
        ("lora:\n  rank: 1\n", ["line 1", "'lora'", "model.lora_rank, model.lora_alpha"]),
        ("training:\n  save_st: 1\n", ["line 2", "training.save_st", "training.save_steps?"]),
        ("optimization:\n  indexer_loss_coeff: 1\n", ["line 2", "training.indexer_loss_coeff?"]),
        ("data:\n  seq-length: 1\n", ["data.seq-length", "data.cutoff_len?"]),
        ("data:\n  tempalte: qwen3\n", ["data.tempalte", "data.template?"]),
        ("trainng:\n  lr: 1\n", ["line 1", "'trainng'", "nearest: training"]),
        ("data:\n  1: 2\n", ["line 2", "data.1"]),
        ("data:\n  null: 2\n", ["unknown field data.None"]),
        # wrong types
        ("training:\n  max_steps: abc\n", ["line 2", "training.max_steps", "'abc' (a text)", "an integer >= -1"]),
        ("training:\n  max_steps: '5'\n", ["training.max_steps", "remove the quotes"]),
        ("training:\n  max_steps: 5.0\n", ["training.max_steps", "5.0 is not an integer"]),
        ("training:\n  max_steps: true\n", ["training.max_steps", "true (a boolean)"]),
        ("training:\n  lr: '1e-5'\n", ["training.lr", "'1e-5' (a text)", "remove the quotes", "a number >= 0"]),
        ("training:\n  lr: .inf\n", ["training.lr", "no finite number"]),
        ("training:\n  lr: [1]\n", ["training.lr", "[1] (a list)"]),
        ("training:\n  profile: 2\n", ["training.profile", "2 (an integer)", "true or false"]),
        ("training:\n  profile: 1.0\n", ["training.profile", "1.0 (a number)"]),
        ("training:\n  profile: maybe\n", ["training.profile", "'maybe'"]),
        ("data:\n  split: 100\n", ["data.split", "100 (an integer)", "put it in quotes", "a text"]),
        ("data:\n  template: true\n", ["data.template", "true (a boolean)", "put it in quotes"]),
        ("model:\n  add_tokens: [a]\n", ["model.add_tokens", "(a list) is no text. Expected a text, or null"]),
        ("parallel:\n  fsdp_modules: lm_head\n", ["parallel.fsdp_modules", "write [lm_head]", "a list of texts"]),
        ("parallel:\n  fsdp_modules: [1]\n", ["parallel.fsdp_modules", "1 (an integer)"]),
        ("training:\n  profile_ranks: [a]\n", ["training.profile_ranks", "'a' (a text)", "a list of integers"]),
        ("data:\n  dataset: 5\n", ["data.dataset", "5 (an integer)", "a mapping"]),
        ("data:\n  dataset: [{file_name: a}]\n", ["data.dataset", "(a mapping)", "without a list"]),
        ("data:\n  dataset: {1: a}\n", ["data.dataset", "the key 1"]),
        # choices and ranges
        ("training:\n  optimizer: adam\n", ["training.optimizer", "'adam'", "adamw, fused_adamw, muon"]),
        ("training:\n  lr: -1\n", ["training.lr", "-1", "out of range", ">= 0"]),
        ("training:\n  warmup_ratio: 1.5\n", ["training.warmup_ratio", "1.5", ">= 0 and <= 1"]),
        ("training:\n  adam_beta2: 1.0\n", ["training.adam_beta2", "1.0", "< 1"]),
        ("training:\n  adam_epsilon: 0\n", ["training.adam_epsilon", "> 0"]),
        ("training:\n  num_train_epochs: 0\n", ["training.num_train_epochs", "> 0"]),
        ("training:\n  gradient_accumulation_steps: 0\n", ["training.gradient_accumulation_steps", ">= 1"]),
        ("training:\n  seed: 4294967296\n", ["training.seed", "out of range"]),
        ("data:\n  cutoff_len: 0\n", ["data.cutoff_len", ">= 1"]),
        # null and None
        ("data:\n  template: None\n", ["line 2", "data.template", "'None'", "write null"]),
        ("data:\n  max_samples: None\n", ["data.max_samples", "write null"]),
        ("parallel:\n  ignored_modules: [None]\n", ["parallel.ignored_modules", "write null"]),
        ("training:\n  lr: null\n", ["training.lr", "null is no value", "leave the field out"]),
        ("training:\n  lr:\n", ["training.lr", "null is no value"]),
    ],
)  # fmt: skip
def test_mistakes_in_yaml(write_yaml: Callable[[str], Path], lines: str, parts: list[str]) -> None:
    path = write_yaml(lines)
    with pytest.raises(UserError) as error:
        parse(str(path), *REQUIRED)
    message = str(error.value)
    assert message.startswith(str(path))
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--training.save_st", "7"], ["--training.save_st", "--training.save_steps?"]),
        (["--training.learning_rate", "7"], ["--training.learning_rate", "--training.lr?"]),
        (["--training.learning_rat", "7"], ["--training.learning_rat;", "--training.lr?"]),
        (["--training.learing-rate", "7"], ["--training.lr?"]),
        (["--learning_rate", "7"], ["--learning_rate", "--training.lr?"]),
        (["--training.logging_step", "7"], ["--training.logging_steps?"]),
        (["--training.finetuning_type", "lora"], ["--training.finetuning_type", "adapters with model.lora_rank"]),
        (["--model.lora_ranks", "8"], ["--model.lora_ranks", "--model.lora_rank?"]),
        (["--lora.qlora", "8"], ["adapters are plain LoRA"]),
        (["--lora-alpha", "8"], ["--lora-alpha", "--model.lora_alpha?"]),
        (["--lora-target-modules", "8"], ["--model.lora_target?"]),
        (["--training.pref_beta", "8"], ["--training.dpo_beta?"]),
        (["--data.dataset", '["a", 5]'], ["--data.dataset", "5 (an integer) in the list is no name"]),
        (["--data.dataset", '["a'], ["--data.dataset", "no valid JSON: Unterminated string starting at character 2"]),
        (["--training.seed=1", "2"], ["'2' is no option"]),
        (["--training.seed=1", "training.lr=2"], ["'training.lr' is no option"]),
        (["--training.save_steps:", "7"], ["--training.save_steps:", "--training.save_steps?"]),
        (["--inference.max_new_tokens:", "7"], ["--inference.max_new_tokens?"]),
        (["--trainin.lr", "1"], ["--trainin.lr", "--training.lr?"]),
        (["--lr", "1"], ["--lr", "--training.lr?"]),
        (["--chek"], ["--chek", "--check?"]),
        (["--check=true"], ["--check", "--check?"]),
        (["--training.seed", "1", "2"], ["--training.seed", "2 values", "1 2"]),
        (["--training.seed"], ["--training.seed", "no value follows"]),
        (["--training.seed="], ["--training.seed", "'' is not an integer"]),
        (["--training.seed", "1.5"], ["'1.5' is not an integer"]),
        (["--training.lr", "nan"], ["--training.lr", "no finite number"]),
        (["--training.lr", "fast"], ["--training.lr", "'fast'", "a number >= 0"]),
        (["--training.profile", "maybe"], ["--training.profile", "'maybe'", "true or false"]),
        (["--training.profile", "true", "false"], ["--training.profile", "2 values"]),
        (["--training.stage", "rlhf"], ["--training.stage", "'rlhf'", "pt, sft, dpo"]),
        (["--training.stage", "null"], ["--training.stage", "null is no value"]),
        (["--data.template", "None"], ["--data.template", "write null"]),
        (["--parallel.fsdp_modules"], ["--parallel.fsdp_modules", "no value follows"]),
        (["--parallel.fsdp_modules", '["a"]'], ["--parallel.fsdp_modules", "separate the items by spaces"]),
        (["--training.profile_ranks", "x"], ["--training.profile_ranks", "'x' is not an integer"]),
        (["--data.dataset", '{"file_name": '], ["--data.dataset", "no valid JSON", "character"]),
        (["--data.dataset", '{"a": 1, "a": 2}'], ["--data.dataset", "'a' stands twice"]),
        (["--data.default_system", "you", "are"], ["--data.default_system", "put quotes"]),
        (["--training.seed", "1", "x.yaml"], ["--training.seed", "2 values"]),
    ],
)
def test_mistakes_on_the_command_line(argv: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse(*REQUIRED, *argv)
    message = str(error.value)
    assert message.startswith("command line: ")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["no configuration", "usage:"]),
        (["--check"], ["no configuration", "usage:"]),
        (["config.json"], ["'config.json'", ".yaml", "usage:"]),
        (["-training.lr", "1"], ["'-training.lr'", "no option"]),
        (
            ["--training.output_dir", "o"],
            ["the command line does not give model.model_name_or_path", "--model.model_name_or_path"],
        ),
        (["--training.seed", "1"], ["model.model_name_or_path and training.output_dir"]),
    ],
)
def test_mistakes_of_the_whole_line(argv: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        parse(*argv)
    assert [part for part in parts if part not in str(error.value)] == []


def test_required_field_missing_names_the_file(write_yaml: Callable[[str], Path]) -> None:
    path = write_yaml("model: {model_name_or_path: m}\n")
    with pytest.raises(UserError, match=r"config\.yaml and the command line do not give training\.output_dir"):
        parse(str(path))


def test_second_yaml_file_is_refused(write_yaml: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=r"'b\.yaml' must be the first argument"):
        parse(str(write_yaml(BASE)), "b.yaml")


@pytest.mark.parametrize("words", [['["a", "b"]'], ['["a",', '"b"]']])
def test_a_json_list_of_data_sets(words: list[str]) -> None:
    assert parse(*REQUIRED, "--data.dataset", *words).data.dataset == ["a", "b"]
