"""What can be found out about model and tokenizer before any data is prepared or any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.config.reference_model import naming_reference, reference_config
from mindspeed_llm.fsdp2.distributed.parallelize import check_patterns
from mindspeed_llm.fsdp2.models.model_factory import build_on_meta, check_weights, load_model_config
from mindspeed_llm.fsdp2.models.tokenizer import check_vocabulary, load_tokenizer
from mindspeed_llm.fsdp2.models.trainable import choose_trainable
from mindspeed_llm.fsdp2.train.forward import check_model_takes


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """`model` has shapes and names only (meta device), with adapters where these are trained."""

    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    model: PreTrainedModel


def preflight(config: Config) -> Preflight:
    """Load tokenizer and model configuration and check them, the headers of the weight files and all module patterns
    against one another.

    Preparing the data of a large run takes hours; a mistake that is found here has not cost them.

    Raises:
        UserError: for the first thing that would stop the run later.
    """
    model_config = load_model_config(config.model)
    tokenizer = load_tokenizer(config.model)
    model = build_on_meta(config, model_config)
    check_vocabulary(tokenizer, model)
    check_patterns(model, config.parallel)
    check_model_takes(
        model,
        segments=config.data.neat_packing or config.data.reset_attention_mask,
        aux_loss=config.training.router_aux_loss_coef > 0,
    )
    if not config.model.train_from_scratch:
        check_weights(config.model, model)
    if choose_trainable(model, config.model) is not None:
        check_patterns(model, config.parallel)  # there are more modules now
    if config.training.stage == "dpo" and config.training.ref_model is not None:
        _check_reference(config, model)
    return Preflight(tokenizer=tokenizer, model_config=model_config, model=model)


def _check_reference(config: Config, model: PreTrainedModel) -> None:
    reference = reference_config(config)
    with naming_reference(config):
        reference_model_config = load_model_config(reference.model)
        sizes = [c.get_text_config().vocab_size for c in (model.config, reference_model_config)]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"training.ref_model: {config.training.ref_model} has a vocabulary of {sizes[1]} and the model one of "
                f"{sizes[0]}; expected a model with the same tokenizer"
            )
        on_meta = build_on_meta(reference, reference_model_config)
        check_patterns(on_meta, config.parallel)
        check_weights(reference.model, on_meta)
