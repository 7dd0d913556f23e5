"""Tokenizers behind one interface, loaded without transformers wherever that gives the same ids."""

from mindspeed_llm.tasks.preprocess.tokenizers.base import TOKENIZER_KINDS, Tokenizer, TokenizerOptions
from mindspeed_llm.tasks.preprocess.tokenizers.loading import load_tokenizer
from mindspeed_llm.tasks.preprocess.tokenizers.transformers_tokenizer import as_tokenizer

__all__ = ["TOKENIZER_KINDS", "Tokenizer", "TokenizerOptions", "as_tokenizer", "load_tokenizer"]
