"""Which weights of a model are trained: all, all but frozen modules, or adapters (LoRA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.model_config import ModelConfig
from mindspeed_llm.fsdp2.distributed.modules import find_modules

if TYPE_CHECKING:
    from peft import LoraConfig


def choose_trainable(model: PreTrainedModel, config: ModelConfig) -> LoraConfig | None:
    """Freeze the modules that `config` names, or add adapters and freeze the rest; all that is not frozen is trained.

    Adapters are made where their layer is (on meta too); `fill_adapters` gives them values. Names of the model's own
    parameters change, see `adapter_names`.

    Returns:
        What adapter_config.json says; None without adapters.

    Raises:
        UserError: a pattern or a target that matches nothing, nothing is left to train, an adapter of another model.
    """
    if config.has_adapters:
        from mindspeed_llm.fsdp2.models.adapters import add_adapters  # PEFT takes a while to import

        return add_adapters(model, config)
    for module in find_modules(model, config.freeze_modules, field="model.freeze_modules").values():
        module.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"model.freeze_modules = {config.freeze_modules} freezes the whole model: nothing is left to train"
        )
    return None
