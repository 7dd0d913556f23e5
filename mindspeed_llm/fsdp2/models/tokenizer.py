"""Loading the tokenizer of a run."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.model_config import ModelConfig


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `tokenizer_name_or_path` (or of the model), with the tokens that the configuration adds.

    A tokenizer without a pad token pads with its end-of-text token; padding never carries loss.

    Raises:
        UserError: no tokenizer can be read there, or it has no end-of-text token.
    """
    field = "tokenizer_name_or_path" if config.tokenizer_name_or_path else "model_name_or_path"
    source = config.tokenizer_name_or_path or config.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            split_special_tokens=config.split_special_tokens,
            trust_remote_code=config.trust_remote_code,
            cache_dir=config.cache_dir,
            revision=config.model_revision,
            token=config.hf_hub_token,
        )
    except Exception as error:  # the library raises many kinds for one cause: there is no readable tokenizer
        raise UserError(
            f"model.{field}: no tokenizer could be read from {source} ({type(error).__name__}: {error}); expected "
            "tokenizer.json or tokenizer.model with tokenizer_config.json"
        ) from error
    if not tokenizer.encode("text", add_special_tokens=False):
        # Without any file transformers makes an empty tokenizer of the model's class, which drops all text.
        raise UserError(
            f"model.{field}: {source} holds no tokenizer: encoding a word gives no token; expected tokenizer.json or "
            "tokenizer.model with tokenizer_config.json"
        )
    if config.add_tokens:
        tokenizer.add_tokens(_split(config.add_tokens))
    if config.add_special_tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": _split(config.add_special_tokens)})
    if tokenizer.eos_token is None:
        raise UserError(f"model.{field}: the tokenizer of {source} has no eos_token; set it in its config")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Refuse a tokenizer that can produce ids for which `model` has no embedding row.

    Raises:
        UserError: with both sizes.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"model.tokenizer_name_or_path: the tokenizer has {len(tokenizer)} tokens, but the model has {rows} "
            "embedding rows; use the tokenizer that belongs to the model, or add fewer tokens"
        )


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]
