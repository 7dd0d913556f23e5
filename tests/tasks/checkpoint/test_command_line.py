"""The flags: upstream's names, errors that say what was meant, and the command as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.command_line import parse
from tests.tasks.checkpoint import toys

FOLDERS = ["--load-dir", "a", "--save-dir", "b"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target-tensor-paralel-size", "2"], "unknown flag .*; did you mean --target-tensor-parallel-size"),
        (["--target-tensor-parallel-siz=2"], "did you mean --target-tensor-parallel-size"),
        (["stray"], "'stray' stands alone"),
        (["--target-tensor-parallel-size", "two"], "'two'; expected a whole number of at least 1"),
        (["--noop-layers", "1;2"], "expected numbers with commas"),
        (["--save-model-type", "safetensors"], "invalid choice: 'safetensors'"),
        (["--save-model-type", "hf"], "nothing to convert"),
        (["--max-shard-size", "big"], "expected a size such as 5GB"),
        (["--use-mcore-models"], "unknown flag --use-mcore-models; see --help"),
        (["--tokenizer-model", "t"], "unknown flag --tokenizer-model; see --help"),
        (["--hf-config-dir", "a"], "did you mean --hf-cfg-dir"),
        (["--load-dir="], "--load-dir: is empty"),
        (["--save-dir", ""], "--save-dir: is empty"),
        (["--save-dir", " "], "--save-dir: is empty"),
        (["--hf-cfg-dir="], "--hf-cfg-dir: is empty"),
        (["--lora-load="], "--lora-load: is empty"),
        (["--model-type-hf="], "--model-type-hf: is empty"),
        (["--input-tp-rank", "2"], "--input-tp-rank is about a Megatron input, and --load-model-type is hf"),
        (["--input-pp-rank", "1"], "--input-pp-rank is about a Megatron input"),
    ],
)
def test_mistakes(flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse([*FOLDERS, *flags])


def test_folders_are_required() -> None:
    with pytest.raises(UserError, match="--save-dir is missing"):
        parse(["--load-dir", "a"])
    with pytest.raises(UserError, match="did you mean --load-dir"):
        parse(["--load-dirr", "a"])


def test_defaults_are_upstreams() -> None:
    request = parse(FOLDERS)
    assert (request.load_model_type, request.save_model_type) == ("hf", "mg")
    assert request.target == {} and request.model_type_hf is None


def test_sizes_are_of_the_output_and_storage_of_the_megatron_side() -> None:
    flags = [*FOLDERS, "--target-pipeline-parallel-size", "2", "--noop-layers", "4,5", "--moe-grouped-gemm"]
    assert parse(flags).target == {"pp": 2, "noop_layers": (4, 5), "moe_grouped_gemm": True}
    back = parse([*flags, "--load-model-type", "mg", "--save-model-type", "hf"])
    assert back.target == {} and back.loaded == {"noop_layers": (4, 5), "moe_grouped_gemm": True}


def test_no_effect_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    parse([*FOLDERS, "--save-layer-by-layer"])
    assert "--save-layer-by-layer has no effect" in capsys.readouterr().out


def test_a_size_of_the_other_side_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    parse([*FOLDERS, "--max-shard-size", "1GB"])
    assert "--max-shard-size has no effect" in capsys.readouterr().out
    to_hf = ["--load-model-type", "mg", "--save-model-type", "hf"]
    parse([*FOLDERS, *to_hf, "--make-vocab-size-divisible-by", "128"])
    assert "--make-vocab-size-divisible-by has no effect" in capsys.readouterr().out
    parse([*FOLDERS, *to_hf, "--max-shard-size", "1GB"])
    parse([*FOLDERS, "--make-vocab-size-divisible-by", "128"])
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--mamba-state-dim", "3"], "qwen3 has no such setting"),
        (["--mamba-num-groups", "3"], "qwen3 has no such setting"),
        (["--mamba-head-dim", "3"], "qwen3 has no such setting"),
    ],
)
def test_flags_about_what_the_model_does_not_have(flags: list[str], reason: str, tmp_path: Path) -> None:
    """Both of a Hugging Face input and of a Megatron one."""
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg")
    for load, of in ((source, "hf"), (tmp_path / "mg", "mg")):
        with pytest.raises(UserError, match=f"{flags[0]} {flags[1]}: {reason}; leave it out"):
            toys.run(load, tmp_path / "never", *flags, of=of)
    assert not (tmp_path / "never").exists()


def test_whole_experts_of_a_model_without_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for family, says in (("qwen3", True), ("qwen3-moe", False)):
        source = toys.toy(tmp_path / family, family)
        toys.run(source, tmp_path / f"{family}-mg", "--expert-tensor-parallel-size", "1")
        assert (f"no effect: {family} has no experts" in capsys.readouterr().out) == says


def test_command(repository: Path, tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    command = [sys.executable, "convert_ckpt_v2.py", "--load-dir", str(source), "--save-dir", str(tmp_path / "mg")]

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *flags], cwd=repository, capture_output=True, text=True, timeout=300)

    refused = run("--target-pipeline-parallel-size", "3")
    assert refused.returncode == 2 and "use --num-layer-list 2,1,1" in refused.stderr
    assert "Traceback" not in refused.stderr
    done = run("--target-pipeline-parallel-size", "2", "--model-type-hf", "qwen3")
    assert done.returncode == 0, done.stderr
    assert "2 weight files" in done.stdout and (tmp_path / "mg" / "iter_0000001" / "mp_rank_00_001").is_dir()


def test_a_typo_is_answered_without_torch() -> None:
    code = "import sys, mindspeed_llm.tasks.checkpoint.command_line\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
