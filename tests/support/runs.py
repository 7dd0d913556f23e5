"""Whole training runs of a toy, as a user would start them: a model directory, data files and a command line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.reference import RECIPE
from tests.support.tokenizers import byte_tokenizer
from tests.support.toys import TOYS, build_toy

SEQUENCE = 48


def digit_tokenizer() -> PreTrainedTokenizerFast:
    """13 tokens: the ten digits, bos, eos and pad; anything else is left out of the text."""
    backend = Tokenizer(models.WordLevel(vocab={str(digit): digit for digit in range(10)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save_model(folder: Path, toy: str, *, dropout: float = 0.0) -> Path:
    """Write the toy with a tokenizer that fits its vocabulary; `dropout` is of the attention."""
    model = build_toy(toy, attention_dropout=dropout)
    model.save_pretrained(folder)
    tokenizer = digit_tokenizer() if TOYS[toy]["vocab_size"] < 256 else byte_tokenizer(pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return folder


def write_texts(path: Path, count: int, *, seed: int = 0) -> Path:
    """Texts of digits, each different, of 10 to 60 characters."""
    source = random.Random(seed)
    rows = [{"text": "".join(source.choices("0123456789", k=source.randint(10, 60)))} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_conversations(path: Path, count: int, *, seed: int = 0) -> Path:
    """Alpaca records of digits, short enough for a few of them to fit in one packed row."""
    source = random.Random(seed)

    def text(longest: int) -> str:
        return "".join(source.choices("0123456789", k=source.randint(2, longest)))

    rows = [{"instruction": text(8), "input": "", "output": text(10)} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sft_data(file: Path, **fields: Any) -> dict[str, Any]:
    """Section `data` for conversations."""
    dataset = {"file_name": str(file), "formatting": "alpaca"}
    return {"dataset": dataset, "template": "empty", "cutoff_len": SEQUENCE, **fields}


def text_data(file: Path, *, manager: str = "mg", **fields: Any) -> dict[str, Any]:
    """Section `data` for texts."""
    return {
        "dataset": {"file_name": str(file)},
        "data_manager_type": manager,
        "cutoff_len": SEQUENCE,
        "append_eod": True,
        **fields,
    }


RECIPE_FIELDS: Mapping[str, Any] = {
    "lr": RECIPE["lr"],
    "min_lr": 0.0,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
    "adam_beta1": RECIPE["betas"][0],
    "adam_beta2": RECIPE["betas"][1],
    "adam_epsilon": RECIPE["eps"],
    "weight_decay": RECIPE["weight_decay"],
    "max_grad_norm": RECIPE["clip"],
}
"""The recipe of `tests.support.reference` in fields of the section `training`."""


def write_config(
    output: Path, model: Path, data: Mapping[str, Any], *, parallel: Mapping[str, Any] | None = None, **training: Any
) -> str:
    """Write the YAML file of a run with output in `output` beside it and return its path.

    The learning rate rises and falls, so that a resumed run which lost its place shows it.
    """
    sections = {
        "model": {"model_name_or_path": str(model)},
        "data": dict(data),
        "parallel": {"param_dtype": "fp32", **(parallel or {})},
        "training": {
            "output_dir": str(output),
            "lr": 1e-3,
            "min_lr": 1e-5,
            "warmup_ratio": 0.2,
            "lr_scheduler_type": "cosine",
            "per_device_train_batch_size": 1,
            "save_epochs": 0,
            "save_steps": 0,
            "tensorboard": False,
            **training,
        },
    }
    path = output.with_name(output.name + ".yaml")
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return str(path)


def copy_run(source: Path, target: Path, *steps: int) -> Path:
    """A run's folder with the checkpoints of `steps` only (all where none are named), as if it had been killed then."""
    shutil.copytree(source, target)
    if steps:
        for path in (target / "checkpoints").glob("global_step_*"):
            if int(path.name.removeprefix("global_step_")) not in steps:
                shutil.rmtree(path)
    for path in target.glob("*.safetensors"):
        path.unlink()
    return target


def exported(output: Path) -> dict[str, torch.Tensor]:
    """All tensors that a run has exported."""
    from safetensors.torch import load_file

    return {name: tensor for path in output.glob("*.safetensors") for name, tensor in load_file(path).items()}


# What must not change when a run is interrupted; times and memory may.
COMPARED = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples", "consumed_tokens")


def metrics(output: Path) -> list[dict[str, Any]]:
    """The steps of metrics.jsonl, only the values that an interruption must not change."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [{key: record[key] for key in COMPARED} for record in records if "lm_loss" in record]


def eval_losses(output: Path) -> list[tuple[int, float]]:
    """(step, loss) of each evaluation in metrics.jsonl."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["iteration"], record["eval_loss"]) for record in records if "eval_loss" in record]
