"""A tokenizer that transformers has loaded, behind the interface of all tokenizers."""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_llm.tasks.preprocess.tokenizers.base import Tokenizer, to_flat
from mindspeed_llm.tasks.preprocess.tokenizers.gigatoken_path import GigatokenPath
from mindspeed_llm.tasks.preprocess.tokenizers.rust_tokenizer import hash_of_files


class TransformersTokenizer:
    """Wraps a tokenizer of transformers, and reads its tokens each time: they may be set after wrapping.

    Where the class encodes with the Rust backend as transformers' own base class does, batches go to the backend
    directly; a class that overrides a step of encoding is called as it is. `is_final` says that nobody adds tokens any
    more.
    """

    def __init__(self, tokenizer: Any, *, is_final: bool = False) -> None:
        self.tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)
        self._documents = GigatokenPath(self._backend) if is_final and self._backend is not None else None
        self.runs_in_threads = self._backend is not None

    @property
    def bos_token(self) -> str | None:
        return self.tokenizer.bos_token

    @property
    def eos_token(self) -> str | None:
        return self.tokenizer.eos_token

    @property
    def pad_token(self) -> str | None:
        return self.tokenizer.pad_token

    @property
    def bos_token_id(self) -> int | None:
        return self.tokenizer.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        return self.tokenizer.pad_token_id

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        return self.tokenizer.chat_template

    def __len__(self) -> int:
        return len(self.tokenizer)

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        if not texts:
            return []
        if self._backend is None:
            return self.tokenizer(
                list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
            )["input_ids"]
        if self._backend.truncation is not None or self._backend.padding is not None:
            # Left behind by a call of the wrapped tokenizer that asked for them.
            self._backend.no_truncation()
            self._backend.no_padding()
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_flat(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> tuple[np.ndarray, np.ndarray]:
        found = self._documents.encode_flat(texts, add_special_tokens) if self._documents is not None else None
        return to_flat(self.encode_batch(texts, add_special_tokens=add_special_tokens)) if found is None else found

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]] | None:
        if not getattr(self.tokenizer, "is_fast", False):
            return None
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], encoded["offset_mapping"]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_chat_template(self) -> str:
        return self.tokenizer.get_chat_template()

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(conversation, **options)

    def identity(self) -> str:
        tokenizer, kind = self.tokenizer, type(self.tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = [
            kind.__name__,
            sorted(tokenizer.special_tokens_map.items()),
            tokenizer.chat_template,
            bool(getattr(tokenizer, "split_special_tokens", False)),
        ]
        if backend is not None:
            parts.append(backend.to_str())
        else:
            settings = {name: _content(value) for name, value in getattr(tokenizer, "init_kwargs", {}).items()}
            # Merges are in no setting and not in the vocabulary, but decide the ids.
            files = {name: _content(Path(tokenizer.name_or_path) / name) for name in kind.vocab_files_names.values()}
            parts += [sorted(tokenizer.get_vocab().items()), sorted(settings.items()), sorted(files.items())]
        if not kind.__module__.startswith("transformers."):
            # Code of the user's own decides ids as well.
            parts.append(inspect.getsource(inspect.getmodule(kind) or kind))
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _content(value: Any) -> str:
    """A setting as text; of a file, such as a sentencepiece model, what is in it."""
    if isinstance(value, str | Path) and Path(value).is_file():
        return hash_of_files(Path(value))
    return str(value)


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """`tokenizer` itself where it is one of ours, else a transformers tokenizer wrapped."""
    if hasattr(tokenizer, "encode_flat"):
        ours: Tokenizer = tokenizer
        return ours
    return TransformersTokenizer(tokenizer)


def _plain_backend(tokenizer: Any) -> Any:
    """The Rust backend, where the class encodes with it as the base class does, else None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    for name, base in (
        ("__call__", PreTrainedTokenizerBase),
        ("encode", PreTrainedTokenizerBase),
        ("_encode_plus", PreTrainedTokenizerFast),
    ):
        if getattr(kind, name) is not getattr(base, name):
            return None
    # What transformers does at each call.
    backend.no_truncation()
    backend.no_padding()
    if hasattr(backend, "encode_special_tokens"):
        backend.encode_special_tokens = bool(tokenizer.split_special_tokens)
    return backend
