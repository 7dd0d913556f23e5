"""What adapters' folders (PEFT's format) and exports hold, as far as it can be told without a tensor."""

from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.model_config import ModelConfig
from mindspeed_llm.fsdp2.config.weight_layout import fingerprint, weight_files
from mindspeed_llm.tasks.checkpoint.peft_config import CONFIG as CONFIG
from mindspeed_llm.tasks.checkpoint.peft_config import WEIGHTS as WEIGHTS
from mindspeed_llm.tasks.checkpoint.peft_config import read_peft_config

FIELD = "model.adapter_name_or_path"
BASE = "base"
"""Where a checkpoint's manifest has `base_fingerprint`, beside `adapter_scale`."""
MERGED = "merged"
"""Folder of the model with the adapter added to its weights, beside the adapter."""


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
        config = read_peft_config(path, may_vary=True)
    except UserError as error:
        raise UserError(f"{FIELD}: {error}") from None
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{FIELD} = {text!r} has no {WEIGHTS} beside its {CONFIG}; copy it there")
    return config


def adapter_scale(model: ModelConfig) -> dict[str, Any] | None:
    """What adapters of these numbers are multiplied with, by the names of adapter_config.json; None without adapters.

    Raises:
        UserError: see `read_adapter_config`.
    """
    if not model.has_adapters:
        return None
    if model.adapter_name_or_path is None:
        given: dict[str, Any] = {"r": model.lora_rank, "lora_alpha": model.chosen_alpha}
    else:
        given = read_adapter_config(model.adapter_name_or_path)
    return {
        "r": given["r"],
        "lora_alpha": given["lora_alpha"],
        "use_rslora": bool(given.get("use_rslora")),
        "rank_pattern": given.get("rank_pattern") or {},
        "alpha_pattern": given.get("alpha_pattern") or {},
    }


def base_fingerprint(model: ModelConfig) -> str | None:
    """The `fingerprint` of the weights that adapters are for. A folder that has moved is the same.

    None where it cannot be told: without adapters, and for a model that is no folder on this machine.
    """
    folder = Path(model.model_name_or_path)
    if not model.has_adapters or not folder.is_dir():
        return None
    return fingerprint(weight_files(folder))


def warn_of_base(model: ModelConfig) -> str | None:
    """The warning for an adapter that says it was made for a model of another name, or None."""
    if model.adapter_name_or_path is None:
        return None
    said = read_adapter_config(model.adapter_name_or_path).get("base_model_name_or_path")
    if not isinstance(said, str) or not Path(said).name:
        return None
    name = Path(model.model_name_or_path).absolute().name
    if Path(said).name == name:
        return None
    return (
        f"{FIELD} = {model.adapter_name_or_path!r} was made for the model {said!r} (base_model_name_or_path in its "
        f"{CONFIG}), and model.model_name_or_path = {model.model_name_or_path!r} has another name: on another model "
        "an adapter has no meaning. Check that they are the same"
    )


def replaced_by_export(folder: Path) -> list[Path]:
    """The folders whose models and adapters an export to `folder` takes the place of.

    `merged` belongs to the adapter beside it; without one it is a folder like any other.
    """
    return [folder / MERGED, folder] if (folder / CONFIG).is_file() else [folder]
