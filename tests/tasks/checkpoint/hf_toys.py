"""Toy models of all families, as transformers makes and saves them from a configuration; values follow from names."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.hf_toy_table import OTHERS, TOYS, Toy

__all__ = ["OTHERS", "TOYS", "Toy", "of_class", "repeat_ends", "save"]


def save(folder: Path, name: str) -> Path:
    """Write the toy's directory."""
    made = (TOYS | OTHERS)[name]
    config, shapes = of_class(made) if name in TOYS else (made.config, {})
    tensors = {key: toys.tensor(key, shape, "F32") for key, shape in (dict(shapes) | dict(made.more)).items()}
    repeat_ends(tensors)
    return toys.save_hf(folder, config, tensors)


def repeat_ends(tensors: dict[str, torch.Tensor]) -> None:
    """Let the MTP layers repeat both ends of the model, as those of checkpoints do."""
    for key in tensors:
        for end, of in (("embed_tokens.weight", "model.embed_tokens.weight"), ("head.weight", "lm_head.weight")):
            if key.startswith("model.layers.") and key.endswith(end):
                tensors[key] = tensors[of].clone()


def of_class(made: Toy) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """config.json and the shapes of all tensors, as transformers writes them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {key: value for key, value in made.config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(made.config["model_type"], **config))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        written = json.loads((Path(folder) / "config.json").read_text())
    return written, {key: tuple(value.shape) for key, value in tensors.items() if not re.search(made.left_out, key)}
