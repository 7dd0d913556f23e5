"""A tiny byte-level tokenizer: one token per byte, so every string round-trips, and special tokens as asked for."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    special_tokens: Sequence[str] = (),
    *,
    bos_token: str | None = "<s>",
    eos_token: str | None = "</s>",
    pad_token: str | None = None,
    chat_template: str | None = None,
) -> PreTrainedTokenizerFast:
    """Ids 0-255 are the bytes (in the order of the byte alphabet), then bos, eos, pad and `special_tokens`.

    Nothing is added by encoding. The vocabulary has 256 tokens plus the special ones that are given.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    named = [token for token in (bos_token, eos_token, pad_token) if token is not None]
    backend.add_special_tokens(list(dict.fromkeys([*named, *special_tokens])))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos_token, eos_token=eos_token, pad_token=pad_token
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def chatml_tokenizer(**options: str | None) -> PreTrainedTokenizerFast:
    """A byte tokenizer with ChatML markers and a plain ChatML chat template."""
    options.setdefault("chat_template", CHATML_TEMPLATE)
    return byte_tokenizer(["<|im_start|>", "<|im_end|>", "<think>", "</think>"], **options)
