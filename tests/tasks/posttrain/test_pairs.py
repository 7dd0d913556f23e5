"""Which pairs preference optimisation takes, their batches, and what it says where data or flags do not fit."""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.megatron_line import format_megatron_step
from mindspeed_llm.tasks.posttrain.dpo import PreferenceOptimization
from mindspeed_llm.tasks.posttrain.instructions import build_instructions
from mindspeed_llm.tasks.posttrain.main import main
from mindspeed_llm.training.arguments.memory import memory_of
from mindspeed_llm.training.arguments.parameters import adapters_of, model_of, stages_of
from tests.observability.records import step
from tests.support.tokenizers import byte_tokenizer
from tests.tasks.posttrain.conversations import make_tokenizer, write_records
from tests.tasks.posttrain.pairs import write_pairs
from tests.tasks.posttrain.test_instructions import BASE, write_samples
from tests.training.arguments.lines import DENSE, arguments

pytestmark = pytest.mark.usefixtures("logging_as_before")
DPO = "--stage dpo --is-pairwise-dataset"


def flags(data: Any, rest: str = "") -> Namespace:
    line = f"{DPO} --global-batch-size 8 --split 100,0,0 --eval-iters 0 --no-shuffle --data-path {data} {rest}"
    return arguments(line, base=BASE)


def side(number: int, length: int, prompt: int) -> tuple[list[int], list[int]]:
    ids = [number, *range(100, 99 + length)]
    return ids, [-100] * prompt + ids[prompt:]


def test_pairs_become_rows_of_one_length(tmp_path: Path) -> None:
    """The chosen sides of all pairs come first; each place has the target of its neighbour on the right."""
    data = write_pairs(tmp_path / "data", [(side(1, 3, 1), side(1, 4, 1)), (side(2, 6, 4), side(2, 5, 4))])
    args = flags(data, "--no-pad-to-seq-lengths --pad-to-multiple-of 4")
    samples = build_instructions(args, None, "pairwise").train
    batch = samples.batch([samples.rows[0], samples.rows[1]], source="x")
    assert batch["tokens"].shape == (4, 8)
    assert [row[:6] for row in batch["tokens"].tolist()] == [
        [1, 100, 101, 0, 0, 0],
        [2, 100, 101, 102, 103, 104],
        [1, 100, 101, 102, 0, 0],
        [2, 100, 101, 102, 103, 0],
    ]
    targets = [[label for label, on in zip(*rows, strict=True) if on] for rows in targets_of(batch)]
    assert targets == [[100, 101], [103, 104], [100, 101, 102], [103]]


def targets_of(batch: Any) -> list[tuple[list[int], list[float]]]:
    return list(zip(batch["labels"].tolist(), batch["loss_mask"].tolist(), strict=True))


def test_long_pairs_are_cut_or_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pair stays where both sides have room for an answer; BASE has 32 tokens."""
    pairs = [
        (side(0, 40, 31), side(0, 8, 4)),
        (side(1, 8, 4), side(1, 40, 32)),
        (side(2, 40, 32), side(2, 40, 33)),
        (side(3, 32, 31), side(3, 50, 4)),
    ]
    samples = build_instructions(flags(write_pairs(tmp_path / "data", pairs)), None, "pairwise").train
    found = [samples.rows[place] for place in range(4)]
    assert [int(row["chosen_input_ids"][0]) for row in found] == [0, 3, 0, 3]
    assert [(len(row["chosen_input_ids"]), len(row["rejected_input_ids"])) for row in found[:2]] == [(32, 8), (32, 32)]
    assert "2 samples are cut to --seq-length 32, 2 are left out" in caplog.text


def test_raw_records_become_pairs(tmp_path: Path) -> None:
    records = [{"instruction": "a", "input": "", "chosen": "bc", "rejected": f"d{number}"} for number in range(4)]
    raw = write_records(tmp_path / "raw.jsonl", records)
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    words = f"--tokenizer-name-or-path {tmp_path / 'tokenizer'} --handler-name AlpacaStylePairwiseHandler"
    args = flags(raw, f"{words} --seq-length 64 --max-position-embeddings 64")
    PreferenceOptimization().check_data(args)
    row = PreferenceOptimization().build_datasets(args, None).train.rows[2]
    found = {name: [int(token) for token in row[f"{name}_labels"] if token != -100] for name in ("chosen", "rejected")}
    ends = "<|im_end|>"
    assert {name: make_tokenizer().decode(ids).split(ends)[0] for name, ids in found.items()} == {
        "chosen": "bc",
        "rejected": "d2",
    }


def test_data_that_are_no_pairs(tmp_path: Path) -> None:
    data = write_samples(tmp_path / "data", [([1, 2], [-100, 2])])
    with pytest.raises(UserError, match=r"data is no pairwise data: .* there is data of kind instruction"):
        PreferenceOptimization().check_data(flags(data))
    raw = write_records(tmp_path / "raw.jsonl", [{"instruction": "a", "output": "b"}])
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    words = f"--tokenizer-name-or-path {tmp_path / 'tokenizer'} --handler-name AlpacaStyleInstructionHandler"
    with pytest.raises(UserError, match=r"makes instruction data, but pairwise data are wanted; choose one of .*Pair"):
        PreferenceOptimization().check_data(flags(raw, words))


@pytest.mark.parametrize("place", [0, 1])
def test_pairs_of_another_tokenizer(tmp_path: Path, place: int) -> None:
    pair = [([1, 5], [-100, 5]), ([1, 5], [-100, 5])]
    pair[place] = ([1, 509], [-100, 509])
    data = write_pairs(tmp_path / "data", [(pair[0], pair[1])])
    with pytest.raises(UserError, match="holds token 509, but the model's vocabulary has 509"):
        PreferenceOptimization().check_data(flags(data))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--stage dpo", "--is-pairwise-dataset is missing; add it"),
        ("--stage sft --is-pairwise-dataset", "--is-pairwise-dataset belongs to preference optimisation; give --stage"),
        ("--stage sft --dpo-beta 0.1", "--dpo-beta belongs to preference optimisation; give --stage dpo"),
        ("--stage sft --refer-model-iter 1", "--refer-model-iter belongs to preference optimisation"),
        (
            f"{DPO} --is-instruction-dataset",
            "--is-instruction-dataset does not go with --stage dpo: the data are pairs",
        ),
        (f"{DPO} --pack", "--pack does not go with --stage dpo: each reply of a pair has a row of its own"),
        (f"{DPO} --reset-attention-mask", "--reset-attention-mask does not go with --stage dpo"),
        (f"{DPO} --dpo-beta 0", "--dpo-beta 0: expected a number above 0"),
        (f"{DPO} --dpo-label-smoothing 0.5", "--dpo-label-smoothing 0.5: expected a number from 0 to below 0.5"),
        (f"{DPO} --dpo-label-smoothing 0.1 --dpo-loss-type ipo", "belongs to --dpo-loss-type sigmoid, not to ipo"),
        (f"{DPO} --mock-data", "--mock-data does not go with --stage dpo"),
    ],
)
def test_mistakes_in_flags(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(shlex.split(f"{BASE} --data-path x {line}"))


def test_flags_that_argparse_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (("--dpo-loss-type kto", "sigmoid, hinge, ipo"), ("--use-wandb", "--use-wandb")):
        with pytest.raises((UserError, SystemExit)) as caught:
            main(shlex.split(f"{BASE} --data-path x {DPO} {words}"))
        assert message in f"{caught.value}{capsys.readouterr().err}"


def test_pretraining_refuses_the_flags_of_pairs() -> None:
    from mindspeed_llm.training.main import main as pretrain

    with pytest.raises(UserError, match="--pref-ftx belongs to preference optimisation; give --stage dpo to posttrain"):
        pretrain(shlex.split(f"{DENSE} --pref-ftx 1"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ref-model {folder}/none", "--ref-model .*none is no folder; expected a Hugging Face model directory or"),
        ("--refer-model-iter 2", "--refer-model-iter 2 names a checkpoint below --ref-model, which is missing"),
        ("--ref-model {folder}/config", "--ref-model .*config has a config.json, but neither weights"),
        ("--ref-model {folder}/hf --refer-model-iter 2", "but --ref-model .*hf is a Hugging Face model directory"),
        (
            "--load {folder}/config --refer-model-iter 2 --lora-target-modules linear_qkv",
            "--refer-model-iter 2 names a checkpoint below --ref-model, which is missing",
        ),
    ],
)
def test_mistakes_about_the_reference(tmp_path: Path, words: str, message: str) -> None:
    for name in ("config", "hf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "hf" / "model.safetensors").touch()
    data = write_pairs(tmp_path / "data", [(side(1, 4, 1), side(1, 4, 1))])
    with pytest.raises(UserError, match=message):
        PreferenceOptimization().check_data(flags(data, words.format(folder=tmp_path)))


def test_rewards_are_in_the_line_whatever_they_are() -> None:
    record = step(extra={"rewards_chosen": -0.5, "rewards_accuracy": 0.0, "z_loss": 0.0})
    line = format_megatron_step(record, total_steps=10)
    assert " rewards chosen: -5.000000E-01 | rewards accuracy: 0.000000E+00 |" in line
    assert "z loss" not in line


def test_the_plan_counts_the_reference_and_both_rows() -> None:
    """A reference doubles the weights, and pairs the rows; adapters need no second model."""

    def memory(words: str) -> Any:
        args = arguments(f"--data-path x --global-batch-size 8 {words}", base=BASE)
        model = model_of(args)
        return memory_of(stages_of(model, adapters_of(model, args))[0], args)

    sft, dpo = memory("--stage sft"), memory(DPO)
    assert dpo.weights == 2 * sft.weights and dpo.gradients == sft.gradients
    assert dpo.activations == memory("--stage sft --micro-batch-size 2").activations
    lora = "--lora-target-modules linear_qkv"
    assert memory(f"{DPO} {lora}").weights == memory(f"--stage sft {lora}").weights


def test_check_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_pairs(tmp_path / "data", [(side(1, 4, 1), side(1, 4, 1))])
    assert main(shlex.split(f"{BASE} {DPO} --data-path {data} --split 100,0,0 --check")) == 0
    assert capsys.readouterr().out.endswith("The arguments are valid.\n")
