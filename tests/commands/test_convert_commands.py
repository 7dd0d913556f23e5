"""Command lines of `convert_ckpt_v2.py` that users type today: as they stand on models of full depth, and on toys."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.command_line import make_parser, parse
from mindspeed_llm.tasks.checkpoint.layout import Topology, ranks
from mindspeed_llm.tasks.checkpoint.main import main
from tests.commands.adapters import merged, save_adapter
from tests.commands.models import full_config, header_only, model_of, toy_config
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_convert import expect_same_hf

COMMANDS = yaml.safe_load((Path(__file__).parent / "convert" / "commands.yaml").read_text(encoding="utf-8"))
REFUSED = [command for command in COMMANDS if "refused" in command]
TO_MEGATRON = [command for command in COMMANDS if "files" in command]
REAL = [command for command in COMMANDS if "real" in command]


def names(commands: list[dict[str, Any]]) -> list[str]:
    return [command["name"] for command in commands]


def test_each_is_tried_somehow() -> None:
    assert names([command for command in COMMANDS if command not in [*REFUSED, *TO_MEGATRON, *REAL]]) == []


@pytest.mark.parametrize("command", TO_MEGATRON, ids=names(TO_MEGATRON))
def test_as_it_stands(command: dict[str, Any]) -> None:
    """The flags mean what their names say, and the model of this name can be split like that."""
    argv = shlex.split(command["argv"])
    request = parse(argv)
    topology = Topology(**request.target)
    sizes = ("tensor", "pipeline", "expert")
    given = [int(value_of(argv, f"--target-{size}-parallel-size") or 1) for size in sizes]
    assert [topology.tp, topology.pp, topology.ep] == given
    model = model_of(
        full_config(command["model"]),
        topology,
        requested=request.model_type_hf,
        num_layers=request.num_layers,
        first_k_dense=request.first_k_dense_replace,
    )
    assert len(ranks(topology)) == command["files"]
    # What ranks share divides: the first rank of the first stage and of the last one stand for the others.
    firsts = [rank for rank in ranks(topology) if (rank.tp, rank.ep) == (0, 0)]
    assert all(list(model.rank_tensors(rank)) for rank in {firsts[0], firsts[-1]})


def value_of(argv: list[str], flag: str) -> str | None:
    """The value behind a flag."""
    return argv[argv.index(flag) + 1] if flag in argv else None


@pytest.mark.parametrize("command", REFUSED, ids=names(REFUSED))
def test_refused(command: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(command["argv"])
    if "model" in command:
        # Nothing is refused here for its experts.
        config = full_config(command["model"])
        config |= {key: 32 for key in ("n_routed_experts",) if key in config}
        header_only(Path(argv[argv.index("--load-dir") + 1]), config)
    before = sorted(Path().rglob("*"))
    with pytest.raises(UserError) as error:
        main(argv)
    assert command["refused"] in str(error.value)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("command", REAL, ids=names(REAL))
def test_for_real(
    command: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(command["argv"])
    load, save = (Path(argv[argv.index(flag) + 1]) for flag in ("--load-dir", "--save-dir"))
    changes = dict(command["real"])
    config = toy_config(changes.pop("toy"), **changes)
    if "before" not in command:
        toys.toy_of(load, config)
        main(argv)
        assert len(list(save.glob("iter_0000001/mp_rank_*/model_optim_rng.pt"))) == command["files"]
        assert (save / "latest_checkpointed_iteration.txt").read_text() == "1"
    else:
        source = toys.toy_of(Path(argv[argv.index("--hf-cfg-dir") + 1]), config)
        split = shlex.split(command["before"])
        toys.run(source, load, *split)
        adapter = _adapter(argv, source, split)
        main(argv)
        if adapter is None:
            expect_same_hf(source, save)
        else:
            expected, found = merged(toys.read_hf(source), adapter), toys.read_hf(save)
            assert sorted(found) == sorted(expected)
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert (save / "conversion_report.json").is_file()
    assert "verified   sample" in capsys.readouterr().out


def _adapter(argv: list[str], source: Path, split: list[str]) -> dict[str, torch.Tensor] | None:
    """The tensors of PEFT of an adapter that is made where the command expects one."""
    folder = value_of(argv, "--lora-load")
    if folder is None:
        return None
    peft = save_adapter(Path("peft"), toys.read_hf(source), without=r"experts\.\d")
    start = argv.index("--lora-target-modules")
    toys.run(peft, Path(folder), "--hf-cfg-dir", str(source), *argv[start : start + 5], *split)
    return load_file(peft / "adapter_model.safetensors")


def test_dry_run_at_full_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first command, on a model without values."""
    monkeypatch.chdir(tmp_path)
    header_only(Path("model_from_hf/qwen3_hf"), full_config("Qwen3-32B"))
    main([*shlex.split(COMMANDS[0]["argv"]), "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("iter_0000001/mp_rank_00_")][7].startswith(
        "iter_0000001/mp_rank_00_007/model_optim_rng.pt: 66 tensors"
    )
    assert "8 files; nothing was written (--dry-run)" in lines[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["model_from_hf"]


# What users' scripts rely on: no flag vanishes, and no default changes, unnoticed.
SURFACE = {
    "--load-model-type": "hf",
    "--save-model-type": "mg",
    "--load-dir": None,
    "--save-dir": None,
    "--model-type-hf": None,
    "--target-tensor-parallel-size": None,
    "--target-pipeline-parallel-size": None,
    "--target-expert-parallel-size": None,
    "--expert-tensor-parallel-size": None,
    "--num-layers-per-virtual-pipeline-stage": None,
    "--moe-grouped-gemm": None,
    "--noop-layers": None,
    "--mtp-num-layers": None,
    "--num-layer-list": None,
    "--moe-tp-extend-ep": None,
    "--mla-mm-split": None,
    "--schedules-method": None,
    "--first-k-dense-replace": None,
    "--num-layers": None,
    "--transformer-impl": None,
    "--hf-cfg-dir": None,
    "--input-tp-rank": None,
    "--input-pp-rank": None,
    "--hidden-size": None,
    "--mamba-state-dim": None,
    "--mamba-num-groups": None,
    "--mamba-head-dim": None,
    "--save-layer-by-layer": False,
    "--lora-load": None,
    "--lora-r": None,
    "--lora-alpha": None,
    "--lora-target-modules": [],
    "--save-lora-to-hf": False,
}
"""Upstream's. None: what the source says, or what Megatron does without it."""
OURS = {
    "--params-dtype": None,
    "--max-shard-size": 5 * 10**9,
    "--workers": "cores",
    "--verify": "sample",
    "--overwrite": False,
    "--dry-run": False,
    "--debug": False,
    "--make-vocab-size-divisible-by": 1,
    "--padded-vocab-size": None,
}
CHOICES = {
    "--load-model-type": ("hf", "mg"),
    "--save-model-type": ("hf", "mg"),
    "--params-dtype": ("fp32", "fp16", "bf16"),
    "--verify": ("full", "sample", "none"),
    "--schedules-method": ("dualpipev",),
    "--transformer-impl": ("local", "transformer_engine"),
}


def test_flags_and_defaults_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    actions = {action.option_strings[-1]: action for action in make_parser()._actions if action.dest != "help"}
    assert {flag: action.default for flag, action in actions.items()} == SURFACE | OURS | {"--workers": 3}
    assert {flag: action.choices for flag, action in actions.items() if action.choices} == CHOICES
    assert [flag for flag, action in actions.items() if not action.help] == []
