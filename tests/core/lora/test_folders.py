"""The folder of `--lora-load` is looked at before anything heavy is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.folders import check_folders, in_words_of
from tests.training.arguments.lines import arguments

_LORA = "--lora-target-modules linear_qkv"


def test_mistakes(tmp_path: Path) -> None:
    model, adapters = tmp_path / "model", tmp_path / "adapters"
    model.mkdir()

    def message(flags: str) -> str:
        with pytest.raises(UserError) as refusal:
            check_folders(arguments(f"{_LORA} {flags}"))
        return str(refusal.value)

    assert "name the model's folder with --load" in message(f"--lora-load {adapters}")
    assert "is the folder of --load" in message(f"--load {model} --lora-load {model}")
    assert "expected a folder with checkpoints" in message(f"--load {model} --lora-load {adapters}")
    # The first start of a command that also restarts: adapters will be saved there.
    check_folders(arguments(f"{_LORA} --load {model} --lora-load {adapters} --save {adapters}"))
    adapters.mkdir()
    check_folders(arguments(f"{_LORA} --load {model} --lora-load {adapters}"))
    (adapters / "adapter_model.safetensors").write_bytes(b"")
    expected = "has adapter_model.safetensors, but no adapter_config.json beside it"
    assert expected in message(f"--load {model} --lora-load {adapters}")


def test_messages_name_the_flag_that_was_given() -> None:
    with (
        pytest.raises(UserError) as refusal,
        in_words_of({"--load": "--lora-load", "--ckpt-step": "--refer-model-iter"}),
    ):
        raise UserError("--load a/--load.b (--ckpt-step, --load-dir, --no--load, --lora-load): name --load")
    said = "--lora-load a/--lora-load.b (--refer-model-iter, --load-dir, --no--load, --lora-load): name --lora-load"
    assert str(refusal.value) == said
