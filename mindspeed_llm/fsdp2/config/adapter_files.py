"""Checks of an adapter's folder (PEFT's format) that need no tensor: adapter_config.json and the weight file."""

import json
import math
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FIELD = "model.adapter_name_or_path"
# Settings with which an adapter is more than a product of two matrices on linear layers; the values without effect.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}


def read_adapter_config(text: str) -> dict[str, Any]:
    """The content of adapter_config.json in the folder that `model.adapter_name_or_path` names.

    Raises:
        UserError: no such folder, a file is missing or damaged, or it is no plain LoRA; says which.
    """
    folder = Path(text)
    path = folder / CONFIG
    if not path.is_file():
        why = "is no folder" if not folder.is_dir() else f"has no {CONFIG}"
        if (folder / "config.json").is_file():
            why += " (it holds a model: name it as model.model_name_or_path)"
        raise UserError(
            f"{FIELD} = {text!r} {why}. Expected the folder of an adapter in PEFT's format, on this machine"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, rank, alpha = config["peft_type"], config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{FIELD}: {path} is not the configuration of an adapter ({error!r}); copy it again") from None
    if kind != "LORA":
        raise UserError(f"{FIELD}: {path} has peft_type {kind!r}. Expected LORA")
    if type(rank) is not int or rank < 1:
        raise UserError(f"{FIELD}: {path} has r {rank!r}. Expected an integer >= 1")
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or alpha <= 0:
        raise UserError(f"{FIELD}: {path} has lora_alpha {alpha!r}. Expected a number > 0")
    for name, harmless in _PLAIN.items():
        if config.get(name) not in harmless:
            raise UserError(
                f"{FIELD}: {path} has {name} {config[name]!r}. Expected plain LoRA on linear layers; merge such an "
                "adapter into the model with PEFT's merge_and_unload, and start from the merged model"
            )
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{FIELD} = {text!r} has no {WEIGHTS} beside its {CONFIG}; copy it there")
    return config
