"""Command lines of inference that users type today, at full size: --check takes them as they stand."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml

from mindspeed_llm.tasks.inference.main import main
from tests.support.tokenizers import chatml_tokenizer

_TRAINING = yaml.safe_load((Path(__file__).parent / "mcore" / "commands.yaml").read_text(encoding="utf-8"))
# Model flags, as they stand in the command that trains it.
QWEN3_8B = next(command["argv"] for command in _TRAINING if command["name"] == "Qwen3-8B")
COMMANDS = {
    "chat": f"{QWEN3_8B} --task chat --max-new-tokens 256 --prompt-type qwen3 --load ./model_weights/qwen3_mcore/ "
    "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path ./model_from_hf/qwen3_hf/",
    "all tasks": f"{QWEN3_8B} --task greedy do_sample beam_search beam_search_with_sampling --top-k 50 --top-p 0.95 "
    "--temperature 0.7 --max-length 256 --use-kv-cache",
}


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize("name", COMMANDS)
def test_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chatml_tokenizer().save_pretrained(tmp_path / "model_from_hf" / "qwen3_hf")
    checkpoints = tmp_path / "model_weights" / "qwen3_mcore"
    (checkpoints / "iter_0000001" / "mp_rank_00_000").mkdir(parents=True)
    # What it says of itself is compared with the flags.
    content = {"args": Namespace(num_layers=36, hidden_size=4096), "model": {}}
    torch.save(content, checkpoints / "iter_0000001" / "mp_rank_00_000" / "model_optim_rng.pt")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("1")
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(COMMANDS[name]), "--check", "4"]) == 0
    out = capsys.readouterr().out
    assert (
        re.search(r"parameters +8,190,735,360\n", out)
        and "Ranks            4: TP 1 x PP 2, 2 copies of the model\n" in out
    )
    assert "stage 1        4,095,369,728 parameters, 7.63 GiB of weights" in out
    assert out.endswith("The arguments are valid.\n")
    named = sorted(re.findall(r">> (--\S+) has no effect", out))
    assert named == sorted(
        ["--transformer-impl", "--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion"]
        + ["--distributed-backend"]
        + ["--use-kv-cache"] * (name == "all tasks")
    )
    [forgotten] = re.findall(r"no effect, as nothing is trained: (.*)", out)
    assert {"--lr", "--train-iters", "--use-ascend-coc", "--ckpt-format"} <= set(forgotten.split())
