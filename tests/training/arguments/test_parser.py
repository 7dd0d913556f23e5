"""Words of the command line: what they become, and what is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.flag import layer_pattern
from mindspeed_llm.training.arguments.parser import parse
from tests.training.arguments.lines import DENSE


def test_values_go_to_megatrons_names() -> None:
    args = parse(
        shlex.split("--num-layers 36 --rotary-base=1000000 --bf16 --disable-bias-linear --data-path 0.3 a 0.7 b")
    )
    assert (args.num_layers, args.rotary_base, args.bf16, args.add_bias_linear) == (36, 1e6, True, False)
    assert args.data_path == ("0.3", "a", "0.7", "b")
    assert args.given == ("add_bias_linear", "bf16", "data_path", "num_layers", "rotary_base")


def test_flags_that_are_not_given_have_their_defaults() -> None:
    args = parse([])
    assert (args.given, args.notices) == ((), ())
    assert (args.num_layers, args.add_bias_linear, args.seed, args.ckpt_format) == (None, True, 1234, "torch_dist")


def test_the_last_of_a_flag_counts() -> None:
    assert parse(["--lr", "1e-3", "--lr=1.e-5"]).lr == 1e-5


@pytest.mark.parametrize(
    ("old", "new"),
    [("--n-group 4", "moe_router_num_groups"), ("--topk-group=4", "moe_router_group_topk")],
)
def test_old_names_are_mapped_and_reported(old: str, new: str) -> None:
    args = parse(shlex.split(old))
    assert getattr(args, new) == 4
    assert args.given == (new,)
    [notice] = args.notices
    assert notice == f"{old[: old.index('4') - 1]} is the old name of --{new.replace('_', '-')}; it will go"


def test_other_names_of_the_interface_are_mapped_silently() -> None:
    args = parse(["--npu-deterministic", "--partial-rotary-factor", "0.5"], FEATURES)
    assert (args.deterministic_mode, args.rotary_percent, args.notices) == (True, 0.5, ())


def test_flags_without_effect_are_reported_once_and_leave_nothing() -> None:
    args = parse(shlex.split("--use-mcore-models --distributed-backend nccl --use-mcore-models"))
    assert args.notices == (
        "--use-mcore-models has no effect: there is one kind of model, that of megatron-core",
        "--distributed-backend has no effect: the device says it: hccl on npu, nccl on cuda, gloo on cpu",
    )
    assert not hasattr(args, "use_mcore_models")
    assert not hasattr(args, "distributed_backend")
    assert args.given == ()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-layrs 3", "unknown flag --num-layrs; did you mean --num-layers?"),
        ("--num_layers 3", "unknown flag --num_layers; did you mean --num-layers?"),
        ("--num-layer 3", "unknown flag --num-layer; did you mean --num-layers?"),
        ("--training.lr 3", "did you mean --lr?"),
        ("--learning-rate 3", "did you mean --lr?"),
        ("--model.model_name_or_path x", "did you mean --model-from-hf?"),
        ("--target-tensor-parallel-size 2", "did you mean --tensor-model-parallel-size?"),
        ("--fused-swiglu", "did you mean --use-fused-swiglu?"),
        ("--num-layers", "--num-layers: expected one argument"),
        ("--num-layers x", "--num-layers: expected a whole number of 1 or more, found 'x'"),
        ("--num-layers 0", "--num-layers: expected a whole number of 1 or more, found '0'"),
        ("--num-layers 3.5", "--num-layers: expected a whole number of 1 or more, found '3.5'"),
        ("--lr nan", "--lr: expected a number, found 'nan'"),
        ("--lr=-1", "--lr: expected a number of 0 or more, found '-1'"),
        ("--adam-beta1 1.5", "--adam-beta1: expected a number from 0 to 1, found '1.5'"),
        ("--normalization rmsnorm", "expected one of LayerNorm, RMSNorm; found 'rmsnorm'; did you mean RMSNorm?"),
        ("--noop-layers 1,a", "--noop-layers: expected whole numbers with commas, such as 5,5,4,4; found '1,a'"),
        ("--moe-layer-freq [2]", "a list of 0 and 1 such as ([0]*3+[1]*21); found '[2]'"),
        ("--spec only_a_module", "--spec: expected 2 arguments"),
        ("--bf16 1", "--bf16 takes no value, found '1': the flag alone is enough"),
        ("--bf16=1", "--bf16 takes no value, found '1': the flag alone is enough"),
        ("--lr 1 2", "'2' belongs to no flag; a value with spaces must stand in quotes"),
        ("run.yaml", "'run.yaml' belongs to no flag; settings of this backend are flags, not files"),
        ("--lu-lora-lr 0", "--lu-lora-lr: expected a number above 0, found '0'"),
        ("--multi-head-latent-attention", "--multi-latent-attention is not available: multi-head latent attention"),
        ("--optimizer muon", "--optimizer muon is not available: Muon is not available yet; use adam"),
        (
            "--ckpt-format=zarr",
            "--ckpt-format zarr is not available: megatron-core no longer writes it; use torch_dist",
        ),
        ("--transformer-impl transformer_engine", "become local ones with convert_ckpt_v2.py"),
    ],
)
def test_mistakes(argv: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(shlex.split(argv), FEATURES)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3),
        ("-1", -1),
        ("[0,1,1]", (0, 1, 1)),
        ("([0]*3+[1]*2)", (0, 0, 0, 1, 1)),
        ("2*[1,0]", (1, 0, 1, 0)),
    ],
)
def test_layer_patterns(text: str, expected: object) -> None:
    assert layer_pattern(text) == expected


@pytest.mark.parametrize("text", ["__import__('os')", "[1]*10**9", "[x]", "[True+1]", "1.5", "[1]+1", ""])
def test_layer_patterns_evaluate_nothing_else(text: str) -> None:
    with pytest.raises(Exception, match="expected a whole number, or a list of 0 and 1"):
        layer_pattern(text)


def test_a_number_may_be_negative() -> None:
    args = parse(shlex.split("--moe-layer-freq -1 --first-k-dense-replace -1"))
    assert (args.moe_layer_freq, args.first_k_dense_replace) == (-1, -1)


@pytest.mark.parametrize(("argv", "expected"), [("--check", 0), ("--check 16", 16), ("--check=16", 16), ("", None)])
def test_check_may_name_a_number_of_ranks(argv: str, expected: int | None) -> None:
    assert parse(shlex.split(argv)).check == expected


def test_help_is_printed_by_one_rank_and_wins_over_a_broken_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--no-such-flag", "--help"], FEATURES)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "  --num-layers N\n        number of layers, --noop-layers included." in text
    assert "(default 1234)" in text
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        parse(["-h"], FEATURES)
    assert capsys.readouterr().out == ""


PROBE = """
import json, sys, time
start = time.monotonic()
from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.training import main
from mindspeed_llm.training.arguments.parser import make_parser, parse
from mindspeed_llm.training.arguments.validate import validate
make_parser(FEATURES, program="x").format_help()
args = validate(parse(sys.argv[1:], FEATURES), 1)
FeaturesManager(FEATURES).validate(args)
FeaturesManager(FEATURES).listing(args)
heavy = [name for name in ("torch", "transformers", "megatron", "numpy") if name in sys.modules]
print(json.dumps([heavy, time.monotonic() - start]))
"""


def test_parsing_checks_help_and_listing_load_no_torch(repository: Path) -> None:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *shlex.split(DENSE)], capture_output=True, text=True, check=True, cwd=repository
    )
    heavy, _ = json.loads(done.stdout)
    assert heavy == []
    assert time.monotonic() - start < 10
