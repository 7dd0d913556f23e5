"""Which backend computes what --load names, and which flags do not go with it."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.arguments.inference import inference_arguments
from mindspeed_llm.tasks.inference.load import weights_fingerprint
from mindspeed_llm.tasks.inference.source import ModelSource, find_source
from tests.tasks.inference.test_kinds import checkpoint

CONFIG = {"num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 6}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """One folder of each kind, with the files that tell it from others."""
    files = {
        "hf/config.json": json.dumps(CONFIG),
        "peft/adapter_config.json": "{}",
        "mcore/latest_checkpointed_iteration.txt": "20",
        "mcore/iter_0000010/mp_rank_00/model_optim_rng.pt": "",
        "mcore/iter_0000020/mp_rank_00/model_optim_rng.pt": "",
        "mcore/release/mp_rank_00/model_optim_rng.pt": "the release",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for step in (200, 400):
        checkpoint(tmp_path / f"run/checkpoints/global_step_{step}")
    return tmp_path


def find(place: Path, flags: str, world_size: int = 1) -> tuple[Namespace, ModelSource]:
    args = inference_arguments(shlex.split(flags.replace("@", f"{place}/")))
    return args, find_source(args, world_size)


@pytest.mark.parametrize(
    ("flags", "kind", "backend"),
    [
        ("--load @hf", "hf", "hf"),
        ("--load @hf --num-layers 4 --hidden-size 48 --use-flash-attn", "hf", "hf"),
        ("--load @hf --use-mcore-models", "hf", "megatron"),
        ("--load @hf --enable-hf2mg-convert", "hf", "megatron"),
        ("--load @hf --backend megatron --tensor-model-parallel-size 2", "hf", "megatron"),
        ("--load @peft --base-model x", "peft", "hf"),
        ("--load @mcore", "mcore", "megatron"),
        ("--load @run --ckpt-step 200", "fsdp2", "hf"),
        ("--load @run/checkpoints/global_step_200 --ckpt-step 200", "fsdp2", "hf"),
        ("--load @hf --backend megatron --lora-load @mcore --ckpt-step 3", "hf", "megatron"),
    ],
)
def test_the_backend(place: Path, flags: str, kind: str, backend: str) -> None:
    _, source = find(place, flags)
    assert (source.kind, source.backend) == (kind, backend)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--load is missing"),
        ("--load @nowhere", "does not exist"),
        ("--load @mcore --backend hf", "--backend hf: .* is a checkpoint of the Megatron backend.*convert_ckpt_v2.py"),
        ("--load @hf --use-mcore-models --backend hf", "--use-mcore-models contradicts --backend hf"),
        ("--load @peft --use-mcore-models", "--use-mcore-models: .* is an adapter in PEFT's format"),
        ("--load @hf --base-model x", "--base-model x is for a PEFT adapter"),
        ("--load @hf --ckpt-step 3", "--ckpt-step 3: .* has no steps"),
        ("--load @run --ckpt-step 300", "--ckpt-step 300: .*/run has no checkpoint of this step; there are: 200, 400"),
        ("--load @run/checkpoints --ckpt-step 300", "checkpoints has no checkpoint of this step; there are: 200, 400"),
        (
            "--load @run/checkpoints/global_step_200 --ckpt-step 300",
            "--ckpt-step 300 contradicts --load .*global_step_200, the checkpoint of step 200; .*has: 200, 400",
        ),
        ("--load @mcore/release", "/release: .*/latest_checkpointed_iteration.txt says release, but it says 20"),
        ("--load @mcore/iter_0000010 --lora-load x", "with --lora-load the model is the checkpoint that .* names"),
        ("--load @hf --hidden-size 64", "--hidden-size 64 contradicts .*config.json, which says hidden_size 48"),
        ("--load @hf --tensor-model-parallel-size 2", "--tensor-model-parallel-size 2: .*--backend megatron"),
        ("--load @hf --lora-load x", "--lora-load is for --backend megatron"),
        ("--load @mcore --shard-weights", "--shard-weights is for --backend hf"),
        ("--load @mcore --trust-remote-code", "--trust-remote-code is for --backend hf"),
        ("--load @mcore/iter_0000020 --ckpt-step 3", "--ckpt-step 3 contradicts --load"),
        ("--load @mcore/iter_0000020/mp_rank_00", "holds no model|expected"),
    ],
)
def test_what_does_not_go_together(place: Path, flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find(place, flags)


def test_flags_that_the_files_make_superfluous_are_named(place: Path) -> None:
    args, _ = find(place, "--load @hf --num-layers 4 --swiglu --shard-weights")
    assert args.notices == (
        "--shard-weights has no effect: there is one rank",
        "no effect, as config.json describes the model of --load: --num-layers --swiglu",
    )
    assert not args.shard_weights
    assert find(place, "--load @hf --shard-weights", world_size=2)[0].shard_weights


def test_one_checkpoint_of_several(place: Path) -> None:
    args, source = find(place, "--load @mcore/iter_0000020")
    assert (source.path, args.load, args.ckpt_step) == (place / "mcore", str(place / "mcore"), 20)
    args, source = find(place, "--load @mcore/iter_0000020 --lora-load x")
    assert (source.path, args.ckpt_step) == (place / "mcore", None)


def test_a_release_is_what_is_loaded(place: Path) -> None:
    other = weights_fingerprint(*find(place, "--load @mcore"))
    (place / "mcore" / "latest_checkpointed_iteration.txt").write_text("release")
    args, source = find(place, "--load @mcore/release")
    assert (source.path, args.load, args.ckpt_step) == (place / "mcore", str(place / "mcore"), None)
    assert weights_fingerprint(args, source) == weights_fingerprint(*find(place, "--load @mcore")) != other


def test_adapters_of_megatron_checkpoints_are_told_apart(place: Path) -> None:
    """A half of an evaluation is not taken up with other adapters."""
    for name, text in {"a/iter_0000010": "a10", "a/iter_0000020": "a20", "b/iter_0000020": "b20"}.items():
        file = place / name / "mp_rank_00" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        (file.parents[2] / "latest_checkpointed_iteration.txt").write_text("20")
    cases = ("", "--lora-load @a", "--lora-load @b", "--lora-load @a --ckpt-step 10")
    found = [weights_fingerprint(*find(place, f"--load @mcore {flags}")) for flags in cases]
    assert None not in found and len(set(found)) == len(cases)
    assert weights_fingerprint(*find(place, "--load @mcore --lora-load @a --ckpt-step 20")) == found[1]
