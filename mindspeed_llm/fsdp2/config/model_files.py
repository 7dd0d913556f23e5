"""Checks of the model directory: config.json, the family it names, weight files, tokenizer directory."""

import json
import re
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.adapter_files import CONFIG, FIELD, MERGED, WEIGHTS
from mindspeed_llm.fsdp2.config.model_config import ModelConfig

INDEX = "model.safetensors.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHT_FILES = (
    (INDEX, ("*.safetensors",)),
    ("pytorch_model.bin.index.json", ("*.bin", "*.pt")),
)


def check_model_files(model: ModelConfig) -> dict[str, Any] | None:
    """Check what `model` names on disk and return the content of config.json; None for a hub id.

    Raises `UserError` for a path that does not exist, a folder without config.json, a model family other than
    `model_id`, and (unless training starts from scratch) missing weight files or an adapter beside them.
    """
    if model.tokenizer_name_or_path is not None:
        _folder("model.tokenizer_name_or_path", model.tokenizer_name_or_path)
    folder = _folder("model.model_name_or_path", model.model_name_or_path)
    if folder is None:
        return None
    description = _read_object(folder / "config.json", model.model_name_or_path)
    _check_family(model, description, folder)
    if not model.train_from_scratch:
        _check_weights(folder)
        check_no_adapter(folder)
    return description


def is_hub_id(text: str) -> bool:
    """Whether `text` reads as `organisation/name` on a model hub and is nothing that exists here."""
    return _HUB_ID.fullmatch(text) is not None and not Path(text).exists()


def _folder(field: str, text: str) -> Path | None:
    """The existing folder that a field names; None for a hub id."""
    if is_hub_id(text):
        return None
    path = Path(text)
    if not path.exists():
        if text.startswith("~"):
            advice = "~ is not expanded here; write the whole path"
        else:
            advice = f"relative paths start at {Path.cwd()}; a hub id has the form organisation/name"
        raise UserError(f"{field} = {text!r} does not exist. Expected a Hugging Face model directory ({advice}).")
    if not path.is_dir():
        raise UserError(f"{field} = {text!r} is a file; expected the folder that holds it")
    return path


def _read_object(path: Path, shown: str) -> dict[str, Any]:
    if not path.is_file():
        if (path.parent / CONFIG).is_file():
            merged = path.parent / MERGED
            where = f", which is in {merged}" if (merged / "config.json").is_file() else ""
            raise UserError(
                f"model.model_name_or_path = {shown!r} holds no {path.name} but an adapter ({CONFIG}). Name the model "
                f"that the adapter was made for here, and the adapter as {FIELD}; or name the model that it is merged "
                f"into{where or ' (training.merge_adapter, or merge_and_unload of PEFT, makes it)'}"
            )
        raise UserError(
            f"model.model_name_or_path = {shown!r} holds no {path.name}; expected a Hugging Face model directory with "
            "config.json, weights and tokenizer"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def _check_family(model: ModelConfig, description: dict[str, Any], folder: Path) -> None:
    family = description.get("model_type")
    if not isinstance(family, str):
        raise UserError(f"{folder / 'config.json'} has no model_type; it is not the config of a transformers model")
    if model.model_id is not None and model.model_id != family:
        raise UserError(
            f"model.model_id = {model.model_id} and {folder / 'config.json'} (model_type {family}) disagree; leave "
            "model_id out to take the family from config.json, or name another model_name_or_path"
        )


def _check_weights(folder: Path) -> None:
    """Look for weights in the order in which they are read: safetensors, then files of torch.save; an index first."""
    for index_name, patterns in _WEIGHT_FILES:
        if (folder / index_name).is_file():
            _check_index(folder, index_name)
            return
        if any(next(folder.glob(pattern), None) for pattern in patterns):
            return
    raise UserError(
        f"model.model_name_or_path: {folder} holds no weights (*.safetensors, *.bin or *.pt); set "
        "model.train_from_scratch to true to start from random weights"
    )


def check_no_adapter(folder: Path) -> None:
    """Raise UserError where a model's folder holds an adapter as well."""
    if (folder / CONFIG).is_file():
        raise UserError(
            f"model.model_name_or_path: {folder} holds an adapter too ({CONFIG}), which transformers would add to the "
            f"model's weights. Move {CONFIG} and {WEIGHTS} away; to train the adapter further, name their new folder "
            "as model.adapter_name_or_path"
        )


def _check_index(folder: Path, index_name: str) -> None:
    weight_map = _read_object(folder / index_name, str(folder)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / index_name} has no weight_map; the index of the weight files is damaged")
    missing = sorted({str(file) for file in weight_map.values() if not (folder / str(file)).is_file()})
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"model.model_name_or_path: {folder} lacks weight files that {index_name} names: "
            f"{', '.join(missing[:3])}{more}; the download is incomplete"
        )
