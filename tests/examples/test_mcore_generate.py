"""The scripts that generate with the Megatron backend: each passes the checks at full size, two answer with toys."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from mindspeed_llm.tasks.inference.main import main
from tests.examples.mcore_models import (
    EXAMPLES,
    TOY_EXPERT_FLAGS,
    TOY_FLAGS,
    TUNING_EXAMPLES,
    Example,
    build_example_toy,
    save_config,
    save_toy_directory,
)
from tests.examples.test_mcore_pretrain import (  # noqa: F401 (workplace is a fixture)
    DEVICE_GIB,
    header_command,
    run_script,
    workplace,
)
from tests.support.pool import RankPool

PROGRAM = "inference.py"
FOLDER = Path("examples/mcore")
# Script -> its devices, and the training script of the same model.
GENERATING: dict[str, tuple[int, str]] = {
    "qwen3/generate_qwen3_0point6b_ptd": (1, "qwen3/pretrain_qwen3_0point6b_4K_ptd"),
    "qwen3/generate_qwen3_1point7b_ptd": (1, "qwen3/pretrain_qwen3_1point7b_4K_ptd"),
    "qwen3/generate_qwen3_8b_ptd": (2, "qwen3/pretrain_qwen3_8b_4K_ptd"),
    "qwen3/generate_qwen3_14b_ptd": (8, "qwen3/pretrain_qwen3_14b_4K_ptd"),
    "qwen3/generate_qwen3_32b_ptd": (8, "qwen3/pretrain_qwen3_32b_4K_ptd"),
    "qwen3_moe/generate_qwen3_30b_a3b_ptd": (4, "qwen3_moe/pretrain_qwen3_30b_a3b_4K_ptd"),
    "qwen3_moe/generate_qwen3_235b_a22b_A3_ptd": (16, "qwen3_moe/pretrain_qwen3_235b_a22b_4k_A3_ptd"),
    "llama3/generate_llama3_8b_ptd": (4, "llama3/pretrain_llama3_8b_ptd"),
    "llama3/generate_llama3_70b_ptd": (8, "llama3/pretrain_llama3_70b_ptd"),
    "mixtral/generate_mixtral_8x7b_ptd": (4, "mixtral/pretrain_mixtral_8x7b_ptd"),
    "qwen25/generate_qwen25_7b_ptd": (2, "qwen25/tune_qwen25_7b_4k_full_ptd"),
    "llama2/generate_llama2_7b_ptd": (2, "llama2/tune_llama2_7b_lu_lora_ptd"),
}
# The two that run: a pipeline, and experts.
AT_TOY_SIZE = {"qwen3/generate_qwen3_8b_ptd": {}, "qwen3_moe/generate_qwen3_30b_a3b_ptd": {"EP": "2"}}
PROMPTS = ["The capital of France", "One, two,", "x"]

pytestmark = pytest.mark.usefixtures("logging_as_before")


def example_of(stem: str) -> Example:
    model = GENERATING[stem][1]
    return EXAMPLES[model] if model in EXAMPLES else TUNING_EXAMPLES[model]


def split_launch(words: list[str]) -> tuple[int, list[str]]:
    """The number of ranks that torchrun starts, and the arguments of the program."""
    start = words.index(PROGRAM)
    launch = dict(zip(words[:start:2], words[1:start:2], strict=True))
    return int(launch["--nproc_per_node"]) * int(launch.get("--nnodes", "1")), words[start + 1 :]


def test_every_model_that_is_trained_has_one(repository: Path) -> None:
    folder = repository / FOLDER
    found = {str(path.relative_to(folder).with_suffix("")) for path in folder.glob("*/generate_*.sh")}
    assert found == GENERATING.keys()
    trained = [example.config for example in (*EXAMPLES.values(), *TUNING_EXAMPLES.values())]
    assert [config for config in trained if config not in [example_of(stem).config for stem in found]] == []


@pytest.mark.parametrize("stem", GENERATING)
def test_full_size(
    workplace: Path,  # noqa: F811
    stem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example, devices = example_of(stem), GENERATING[stem][0]
    done, words = run_script(workplace, stem, TOKENIZER_PATH="./tokenizer")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(workplace)
    # It refuses flags that contradict the configuration.
    config = save_config(example, workplace / "model")
    (config / "model.safetensors").touch()
    own = ["--load", str(config), "--tokenizer-name-or-path", "./tokenizer", "--check"]
    for launch, described in (
        (words, ["--model-from-hf", str(config)]),
        (header_command(workplace / FOLDER / f"{stem}.sh"), []),
    ):
        ranks, argv = split_launch(launch)
        assert ranks == devices
        assert main([*argv, *own, str(ranks), *described]) == 0
        out = capsys.readouterr().out
        assert f"  parameters     {example.parameters:,}" in out
        assert "no effect" not in out
        stages = re.findall(r"([\d.]+) GiB of weights$", out, re.MULTILINE)
        assert stages and all(float(size) < 0.9 * DEVICE_GIB for size in stages), out


@pytest.mark.parametrize("stem", GENERATING)
def test_variables_of_the_header_are_those_of_the_script(repository: Path, stem: str) -> None:
    text = (repository / FOLDER / f"{stem}.sh").read_text(encoding="utf-8")
    header = " ".join(line[1:].strip() for line in text.partition("set -euo")[0].splitlines())
    named = re.search(r"Environment: (.*?)\.", header)
    assert named is not None
    assert named[1].split(", ") == re.findall(r"^([A-Z_]+)=\"\$\{\1:?-", text, re.MULTILINE)
    assert f"bash {FOLDER}/{stem}.sh" in header


@pytest.mark.distributed
@pytest.mark.parametrize("stem", AT_TOY_SIZE)
def test_toy_size(workplace: Path, stem: str, rank_pool: RankPool) -> None:  # noqa: F811
    example = example_of(stem)
    save_toy_directory(example, workplace / "toy")
    (workplace / "in.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    sizes = shlex.split(f"{TOY_FLAGS} {TOY_EXPERT_FLAGS.get(example.toy.name, '')}")
    files = ["--prompt-file", "in.jsonl", "--output-file", "out.jsonl", "--max-new-tokens", "4"]
    environment = {"NPUS_PER_NODE": "2", "TASK": "greedy", "PROMPT_TYPE": "", "TOKENIZER_PATH": "./tokenizer"}
    _, words = run_script(workplace, stem, *sizes, *files, CKPT_LOAD_DIR="./toy", **environment, **AT_TOY_SIZE[stem])
    ranks, argv = split_launch(words)
    codes = rank_pool.run("tests.examples.rows:infer_in", ranks=ranks, folder=str(workplace), argv=argv)
    assert codes == [0, 0]
    rows = [json.loads(line) for line in (workplace / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == PROMPTS
    model = build_example_toy(example)
    for row in rows:
        ids = list(row["prompt"].encode())
        assert len(row["token_ids"]) == len(row["logprobs"]) == 4
        with torch.no_grad():
            expected = model(torch.tensor([[*byte_ids(ids), *row["token_ids"]]])).logits[0].log_softmax(-1)
        found = expected[len(ids) - 1 : -1].gather(-1, torch.tensor(row["token_ids"])[:, None])[:, 0]
        # The script computes in bf16.
        assert torch.allclose(found, torch.tensor(row["logprobs"]), atol=0.25), (found, row["logprobs"])


def byte_ids(values: list[int]) -> list[int]:
    from tests.support.tokenizers import byte_tokenizer

    return byte_tokenizer().encode(bytes(values).decode())
