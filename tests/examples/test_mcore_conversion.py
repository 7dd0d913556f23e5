"""The example scripts that convert weights: as they stand on models of full depth, and there and back on toys.

A script starts `python`, for which a stand-in notes the arguments; the conversion is then done in this process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_llm.tasks.checkpoint.command_line import parse
from mindspeed_llm.tasks.checkpoint.convert import convert
from mindspeed_llm.tasks.checkpoint.layout import Topology, ranks
from tests.commands.adapters import ALPHA, RANK, merged, save_adapter
from tests.commands.models import full_config, model_of, toy_config
from tests.support.command_line import environment
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_convert import expect_same_hf

FOLDER = Path("examples/mcore")
COPY = "a copy of lm_head.weight"
FAKE_PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$ARGUMENTS"
"""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A pair of scripts, and what they are tried on."""

    model: str
    """Of which the numbers in the script are."""
    files: int
    """Rank files that the script as it stands makes of this model."""
    toy: str
    small: dict[str, str] = field(default_factory=dict)
    """The script's variables for the toy."""
    mtp: bool = False
    """Whether the model has an MTP layer and the scripts take it along."""


TP2, PP2, EP2 = {"TP": "2"}, {"PP": "2"}, {"EP": "2"}
ETP1, VPP1, NOOP, LIST = {"ETP": "1"}, {"VPP": "1"}, {"NOOP_LAYERS": "0,5"}, {"LAYER_LIST": "1,3"}


def example(model: str, files: int, toy: str, *small: dict[str, str], mtp: bool = False) -> Example:
    """Short for `Example`."""
    variables = {key: value for each in small for key, value in each.items()}
    return Example(model=model, files=files, toy=toy, small=variables, mtp=mtp)


EXAMPLES = {
    "qwen3/ckpt_convert_qwen3": example("Qwen3-32B", 8, "qwen3", TP2, PP2),
    "qwen3_moe/ckpt_convert_qwen3_moe": example("Qwen3-30B-A3B", 8, "qwen3-moe", TP2, PP2, EP2),
    "qwen3_moe/ckpt_convert_qwen3_moe_235b": example("Qwen3-235B-A22B", 128, "qwen3-moe", PP2, EP2, VPP1, NOOP),
    "qwen3_moe/ckpt_convert_qwen3_moe_480b": example("Qwen3-Coder-480B", 128, "qwen3-moe", TP2, PP2, EP2, VPP1, NOOP),
    "qwen3_next/ckpt_convert_qwen3_next_80b": example("Qwen3-Next-80B", 64, "qwen3-next", PP2, EP2),
    "qwen3_coder_next/ckpt_convert_qwen3_coder_next_80b": example("Qwen3-Next-80B", 64, "qwen3-next", PP2, EP2),
    "qwen25/ckpt_convert_qwen25": example("Qwen2.5-7B", 4, "qwen2", TP2, PP2),
    "llama2/ckpt_convert_llama2": example("Llama-2-7B", 8, "llama", TP2, PP2),
    "mixtral/ckpt_convert_mixtral": example("Mixtral-8x7B", 8, "mixtral", TP2, PP2, EP2),
    "deepseek2_lite/convert_ckpt_deepseek2_lite": example("DeepSeek-V2-Lite", 8, "deepseek2-lite", TP2, PP2, EP2),
    "deepseek3/ckpt_convert_deepseek3": example("DeepSeek-V3", 512, "deepseek3", TP2, PP2, EP2, VPP1, NOOP, mtp=True),
    "deepseek32/ckpt_convert_deepseek32": example("DeepSeek-V3.2", 512, "deepseek32", TP2, PP2, EP2, NOOP, mtp=True),
    "glm5/ckpt_convert_glm5": example("GLM-5", 512, "glm5", TP2, PP2, EP2, VPP1, NOOP, mtp=True),
    "glm52/ckpt_convert_glm52": example("GLM-5", 512, "glm5", TP2, PP2, EP2, LIST, mtp=True),
    "glm45/ckpt_convert_glm45": example("GLM-4.5", 128, "glm45", TP2, PP2, EP2),
    "glm45-air/ckpt_convert_glm45_air": example("GLM-4.5-Air", 64, "glm45", TP2, PP2, EP2),
    "longcat/ckpt_convert_longcat_flash": example("LongCat-Flash", 128, "longcat", TP2, PP2, EP2),
    "ling_v2/ckpt_convert_ling": example("Ling-mini-2.0", 32, "bailing_mini", TP2, PP2, EP2),
    "ling_v2/ckpt_convert_ring_1T": example("Ring-1T", 512, "bailing_mini", TP2, PP2, EP2),
    "magistral/ckpt_convert_magistral_small": example("Magistral-Small", 8, "mistral", TP2, PP2),
    "phi35/ckpt_convert_phi35_mini": example("Phi-3.5-mini", 4, "phi3", TP2, PP2),
    "phi35/ckpt_convert_phi35_moe": example("Phi-3.5-MoE", 16, "phi3.5-moe", TP2, PP2, EP2),
    "plm/ckpt_convert_plm_1point8b": example("PLM-1.8B", 1, "plm", TP2, PP2),
    "gemma2/ckpt_convert_gemma2": example("Gemma-2-9B", 8, "gemma2", TP2, PP2),
    "seed_oss/ckpt_convert_seed_oss": example("Seed-OSS-36B", 8, "seed-oss", TP2, PP2),
}
LORA = {
    "qwen3/ckpt_convert_qwen3_mcore2hf_lora": "qwen3",
    "qwen25/ckpt_convert_qwen25_mcore2hf_lora": "qwen2",
    "llama2/ckpt_convert_llama2_mcore2hf_lora": "llama",
    "llama2/ckpt_convert_llama2_lora2hf": "llama",
    "deepseek3/ckpt_convert_deepseek3_merge_lora2hf": "deepseek3",
}
"""Script -> toy."""


def test_all_are_tried(repository: Path) -> None:
    found = {str(path.relative_to(repository / FOLDER).with_suffix("")) for path in (repository / FOLDER).rglob("*.sh")}
    pairs = {f"{stem}_{way}" for stem in EXAMPLES for way in ("hf2mcore", "mcore2hf")}
    assert {name for name in found if "convert_ckpt" in name or "ckpt_convert" in name} == pairs | set(LORA)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A copy of the scripts, beside a `python` that notes its arguments."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(repository / FOLDER, folder / FOLDER)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").write_text(FAKE_PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    return folder


def arguments(workplace: Path, name: str, *flags: str, **variables: str) -> list[str]:
    """What the script gives to convert_ckpt_v2.py, started from another folder."""
    noted = workplace / "arguments"
    kept = {"PATH": f"{workplace / 'bin'}{os.pathsep}{os.environ['PATH']}", "ARGUMENTS": str(noted)}
    script = workplace / FOLDER / f"{name}.sh"
    subprocess.run(["bash", str(script), *flags], env=kept | variables, cwd="/", check=True, timeout=60)
    program, *given = noted.read_text().splitlines()
    assert program == "./convert_ckpt_v2.py"
    return given


@pytest.mark.parametrize("name", EXAMPLES)
def test_numbers_of_the_script_fit_its_model(name: str, workplace: Path) -> None:
    """At full depth, with all heads and experts: the first rank of each stage stands for the others."""
    made = EXAMPLES[name]
    request = parse(arguments(workplace, f"{name}_hf2mcore", LOAD_DIR="hf", SAVE_DIR="mg"))
    topology = Topology(**request.target)
    model = model_of(full_config(made.model), topology, requested=request.model_type_hf)
    files = ranks(topology)
    assert len(files) == made.files
    layers = {layer for chunk in model.chunks for _, layer in chunk.layers}
    assert layers == set(range(model.settings["num_layers"]))
    for rank in files:
        if (rank.tp, rank.ep) == (0, 0):
            assert [tensor for tensor in model.rank_tensors(rank) if tensor.pieces]


@pytest.mark.parametrize("name", EXAMPLES)
def test_there_and_back(name: str, workplace: Path, tmp_path: Path) -> None:
    made = EXAMPLES[name]
    source = toys.toy_of(tmp_path / "hf", toy_config(made.toy, num_nextn_predict_layers=int(made.mtp)))
    paths = {"LOAD_DIR": str(source), "SAVE_DIR": str(tmp_path / "mg")}
    forth = parse(arguments(workplace, f"{name}_hf2mcore", **paths, **made.small))
    assert set(convert(forth).plan.dropped.values()) <= {COPY}
    assert len(list((tmp_path / "mg").glob("*/mp_rank_*"))) > 1
    paths = {"LOAD_DIR": str(tmp_path / "mg"), "SAVE_DIR": str(tmp_path / "back"), "HF_CFG_DIR": str(source)}
    convert(parse(arguments(workplace, f"{name}_mcore2hf", **paths)))
    expect_same_hf(source, tmp_path / "back")


@pytest.mark.parametrize("name", LORA)
def test_adapters(name: str, workplace: Path, tmp_path: Path) -> None:
    """Base and adapter stand in two checkpoints, split differently; the values are computed here."""
    source = toys.toy_of(tmp_path / "hf", toy_config(LORA[name]))
    weights = toys.read_hf(source)
    adapter = save_adapter(tmp_path / "peft", weights, without=r"experts\.\d")
    modules = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    toys.run(source, tmp_path / "base", "--target-tensor-parallel-size", "2", "--verify", "none")
    more = ["--hf-cfg-dir", str(source), "--lora-target-modules", *modules, "--target-pipeline-parallel-size", "2"]
    toys.run(adapter, tmp_path / "adapter", *more, "--verify", "none")
    paths = {"LOAD_DIR": "base", "LORA_LOAD": "adapter", "HF_CFG_DIR": "hf", "SAVE_DIR": "out"}
    variables = {variable: str(tmp_path / folder) for variable, folder in paths.items()}
    convert(parse(arguments(workplace, name, LORA_R=str(RANK), LORA_ALPHA=str(ALPHA), **variables)))
    before = load_file(adapter / "adapter_model.safetensors")
    if name.endswith("llama2_lora2hf"):
        written = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert sorted(written) == sorted(before)
        assert all(torch.equal(value, before[key]) for key, value in written.items())
        return
    found = toys.read_hf(tmp_path / "out")
    assert sorted(found) == sorted(weights)
    assert any(not torch.equal(value, weights[key]) for key, value in found.items())
    for key, value in merged(weights, before).items():
        assert torch.equal(value, found[key]), key


def test_a_script_as_a_user_starts_it(workplace: Path, tmp_path: Path, repository: Path) -> None:
    """With the paths that it has, from another folder, and with an exit code that says what became of it."""
    root = tmp_path / "repository"
    shutil.copytree(repository / FOLDER / "qwen3", root / FOLDER / "qwen3")
    shutil.copy(repository / "convert_ckpt_v2.py", root)
    source = toys.toy(root / "model_from_hf" / "qwen3_hf", "qwen3", num_hidden_layers=9)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
        script = root / FOLDER / "qwen3" / f"ckpt_convert_qwen3_{name}.sh"
        variables = environment(repository, PATH=path)
        return subprocess.run(["bash", str(script), *flags], cwd="/", env=variables, capture_output=True, text=True)

    refused = run("hf2mcore")
    assert refused.returncode == 2 and "--num-layer-list 2,1,1,1,1,1,1,1" in refused.stderr
    done = run("hf2mcore", "--num-layer-list", "2,1,1,1,1,1,1,1")
    assert done.returncode == 0 and "8 weight files" in done.stdout, done.stderr
    assert run("mcore2hf").returncode == 0
    expect_same_hf(source, root / "model_from_mg" / "qwen3_hf")
