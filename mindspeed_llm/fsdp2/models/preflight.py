"""What can be found out about model and tokenizer before any data is prepared or any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.distributed.parallelize import check_patterns
from mindspeed_llm.fsdp2.models.model_factory import build_on_meta, check_weights, load_model_config
from mindspeed_llm.fsdp2.models.tokenizer import check_vocabulary, load_tokenizer
from mindspeed_llm.fsdp2.train.forward import check_model_takes


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """`model` has shapes and names only (meta device)."""

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
    return Preflight(tokenizer=tokenizer, model_config=model_config, model=model)
