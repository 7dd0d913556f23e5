"""The fine-tuning scripts of the Megatron backend: each passes the checks at full size and trains a toy for real."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest

from mindspeed_llm.tasks.posttrain.main import main
from tests.examples.mcore_models import TOY_EXPERT_FLAGS, TOY_FLAGS, TUNING_EXAMPLES, save_config, save_toy_directory
from tests.examples.test_mcore_pretrain import (  # noqa: F401 (workplace is a fixture)
    DEVICE_GIB,
    header_command,
    run_script,
    workplace,
)
from tests.support.pool import RankPool
from tests.support.tokenizers import chatml_tokenizer
from tests.tasks.posttrain.conversations import HANDLER, make_records, write_records

PROGRAM = "posttrain_gpt.py"
FOLDER = Path("examples/mcore")
DATA = ("--data-path", "./records.jsonl", "--tokenizer-name-or-path", "./tokenizer")
PAIRWISE = ["--handler-name", "AlpacaStylePairwiseHandler", "--prompt-type", "qwen3"]
# Two that differ in all but the model run always.
ALWAYS = ("qwen3/tune_qwen3_8b_4K_lora_ptd", "qwen3_moe/dpo_qwen3_30b_a3b_4K_ptd")

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture
def place(workplace: Path) -> Path:  # noqa: F811
    """With records that are good as pairs too, and a tokenizer that knows the marks of Qwen's templates."""
    records = [record | {"chosen": record["output"], "rejected": "no"} for record in make_records(40)]
    write_records(workplace / "records.jsonl", records)
    chatml_tokenizer(pad_token="<pad>").save_pretrained(workplace / "tokenizer")
    return workplace


def handler(stem: str) -> list[str]:
    return PAIRWISE if "/dpo_" in stem else HANDLER


def split_launch(words: list[str]) -> tuple[int, list[str]]:
    """The number of ranks that torchrun starts, and the arguments of the program."""
    start = words.index(PROGRAM)
    launch = dict(zip(words[:start:2], words[1:start:2], strict=True))
    return int(launch["--nproc_per_node"]) * int(launch.get("--nnodes", "1")), words[start + 1 :]


def test_the_names_are_those_that_users_know(repository: Path) -> None:
    folder = repository / FOLDER
    found = [path for name in ("tune", "dpo") for path in folder.glob(f"*/{name}_*.sh")]
    assert {str(path.relative_to(folder).with_suffix("")) for path in found} == TUNING_EXAMPLES.keys()


@pytest.mark.parametrize("stem", TUNING_EXAMPLES)
def test_full_size(place: Path, stem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = TUNING_EXAMPLES[stem]
    done, words = run_script(place, stem)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(place)
    # It refuses flags that contradict the configuration.
    config = save_config(example, place / "model")
    (config / "model.safetensors").touch()
    own = ["--model-from-hf", str(config), "--load", str(config), *DATA, *handler(stem)]
    for launch in (words, header_command(place / FOLDER / f"{stem}.sh")):
        ranks, argv = split_launch(launch)
        assert ranks == example.ranks
        assert main([*argv, "--check", str(ranks), *own]) == 0
        out = capsys.readouterr().out
        assert f"  parameters     {example.parameters:,}" in out
        assert " has no effect" not in out
        stages = re.findall(r"^  .*layers .* ([\d.]+) GiB$", out, re.MULTILINE)
        assert stages and all(float(size) < 0.9 * DEVICE_GIB for size in stages), out


@pytest.mark.parametrize("stem", TUNING_EXAMPLES)
def test_variables_of_the_header_are_those_of_the_script(repository: Path, stem: str) -> None:
    text = (repository / FOLDER / f"{stem}.sh").read_text(encoding="utf-8")
    header = " ".join(line[1:].strip() for line in text.partition("set -euo")[0].splitlines())
    named = re.search(r"Environment: (.*?)\.", header)
    assert named is not None
    assert named[1].split(", ") == re.findall(r"^([A-Z_]+)=\"\$\{\1:?-", text, re.MULTILINE)
    assert f"bash {FOLDER}/{stem}.sh" in header
    # What its text says it reads is there.
    [source] = re.findall(r"the prefix that (\S+) writes", text)
    assert (repository / FOLDER / stem).with_name(source).exists()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "stem",
    [stem if stem in ALWAYS else pytest.param(stem, marks=pytest.mark.sampled(4)) for stem in TUNING_EXAMPLES],
)
def test_toy_size(place: Path, stem: str, rank_pool: RankPool) -> None:
    example = TUNING_EXAMPLES[stem]
    save_toy_directory(example, place / "toy")
    environment = {
        "NPUS_PER_NODE": str(max(example.toy.ranks, 2)),
        "DATA_PATH": "./records.jsonl",
        "TOKENIZER_PATH": "./tokenizer",
        "CKPT_LOAD_DIR": "./toy",
        "CKPT_SAVE_DIR": "./ckpt",
        "GBS": "4",
        "SEQ_LENGTH": "128",
        "TRAIN_ITERS": "2",
        **example.toy.environment,
        **({"REF_MODEL": "./toy"} if "/dpo_" in stem else {}),
    }
    sizes = shlex.split(f"{TOY_FLAGS} {TOY_EXPERT_FLAGS.get(example.toy.name, '')} {example.toy.flags}")
    _, words = run_script(place, stem, *handler(stem), *sizes, **environment)
    ranks, argv = split_launch(words)
    codes = rank_pool.run("tests.examples.rows:posttrain_in", ranks=ranks, folder=str(place), argv=argv)
    assert codes == [0] * ranks
    lines = (place / "ckpt" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "lm_loss" in record]
    assert [record["iteration"] for record in records] == [1, 2]
    assert all(math.isfinite(record["lm_loss"]) and record["grad_norm"] > 0 for record in records)
    if "/dpo_" in stem:
        # The policy is the reference until the first update.
        assert records[0]["lm_loss"] == pytest.approx(math.log(2), rel=1e-3)
    assert (place / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "2"
