"""The settings of DPO's reference model, which follow from those of the run."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config


def reference_config(config: Config) -> Config:
    """The configuration that builds the reference: `training.ref_model`, or the model as it was before training."""
    own = {"lora_rank": None, "adapter_name_or_path": None, "freeze_modules": []}
    if config.training.ref_model is not None:
        own |= {"model_name_or_path": config.training.ref_model, "model_id": None, "train_from_scratch": False}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **own))


@contextmanager
def naming_reference(config: Config) -> Iterator[None]:
    """Errors about the reference's files name the field that they were found by."""
    try:
        yield
    except UserError as error:
        if config.training.ref_model is None:
            raise
        text = str(error).replace("model.model_name_or_path", "training.ref_model")
        if "training.ref_model" not in text:
            text = f"training.ref_model: {text}"
        raise UserError(text) from error
