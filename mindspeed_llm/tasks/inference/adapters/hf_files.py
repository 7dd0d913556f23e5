"""What a model directory must hold before it is worth to load anything; its errors in the words of commands that ask
models. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.stopping import of_generation_config

_FIELDS = ("model.model_name_or_path", "model.adapter_name_or_path")
# What the checks of training runs advise -> what helps here.
_ADVICE = {
    "; set model.train_from_scratch to true to start from random weights": (
        "; copy the weights of the model there, or name the folder that has them"
    ),
    "to train the adapter further, name their new folder as model.adapter_name_or_path": (
        "to ask the model with the adapter, name their new folder with --load and this one with --base-model"
    ),
    " here, and the adapter as model.adapter_name_or_path; or name": " here; or name",
    "an adapter would be for one of both only. Leave it out": (
        "merged, the adapter would change both. To ask this one, generate with PEFT itself (PeftModel)"
    ),
    "training.merge_adapter, or merge_and_unload of PEFT, makes it": "merge_and_unload of PEFT makes it",
}
_NUMBERS = ("max_position_embeddings", "vocab_size")
_TOKENIZERS = ("*token*", "*vocab*", "merges.txt", "*.model", "tekken.json")


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors about files name what they were found by, and advise what helps here: neither is a field of a training
    run.
    """
    try:
        yield
    except UserError as error:
        text = str(error)
        for of_training, here in _ADVICE.items():
            text = text.replace(of_training, here)
        for field in _FIELDS:
            text = text.replace(field, what)
        raise UserError(text) from error


def check_directory(folder: Path, *, has_other_tokenizer: bool) -> None:
    """Look for what a Hugging Face model directory is loaded from.

    Args:
        has_other_tokenizer: flags name a tokenizer, so that none need be here.

    Raises:
        UserError: config.json is none of a model, or damaged as `check_values` says; or there are no weights, or no
            tokenizer.
    """
    from mindspeed_llm.fsdp2.config.model_config import ModelConfig
    from mindspeed_llm.fsdp2.config.model_files import check_model_files

    with naming("--load"):
        check_model_files(ModelConfig(model_name_or_path=str(folder)))
    check_values(folder)
    if not has_other_tokenizer and not holds_tokenizer(folder):
        raise UserError(
            f"--load {folder} holds no tokenizer (such as tokenizer.json); copy it there, or name one with "
            "--tokenizer-name-or-path"
        )


def holds_tokenizer(folder: Path) -> bool:
    """Whether there are files that may be those of a tokenizer."""
    return any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS)


def check_values(folder: Path) -> None:
    """Look at the values that texts and their ends depend on, in the files of a model directory: transformers takes
    some that are none without a word.

    Raises:
        UserError: max_position_embeddings or vocab_size in config.json is no number above 0; generation_config.json is
            damaged.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    of_text = config.get("text_config")
    for section, values in (("", config), ("text_config.", of_text if isinstance(of_text, dict) else {})):
        for name in _NUMBERS:
            value = values.get(name)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(
                    f"{file}: {section}{name} {json.dumps(value)}; expected a whole number above 0. Copy the file of "
                    "the model again"
                )
    of_generation_config(folder)


def positions_of(folder: Path) -> int | None:
    """Positions that the model of a checked directory has for a text, as far as its config.json says it in the usual
    words.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    of_text = config.get("text_config")
    found = (of_text if isinstance(of_text, dict) else config).get("max_position_embeddings")
    return found if isinstance(found, int) else None
