"""A tokenizer of the `tokenizers` library, used without transformers."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.tokenizers.base import to_flat
from mindspeed_llm.tasks.preprocess.tokenizers.gigatoken_path import GigatokenPath

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class RustTokenizer:
    """Wraps a `tokenizers.Tokenizer`; `special` maps bos_token, eos_token, pad_token to their tokens, where given.

    `load_transformers` gives the same tokenizer as transformers loads it; it is called for chat templates only, since
    the import takes seconds. `content_hash` is a hash of what the backend was made from.
    """

    runs_in_threads = True

    def __init__(
        self,
        backend: "Backend",
        *,
        content_hash: str,
        special: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        load_transformers: Callable[[], Any] | None = None,
    ) -> None:
        # Neither is a part of ids: transformers switches both off for every call.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._special = dict(special or {})
        self.chat_template = chat_template
        self._content_hash = content_hash
        self._load_transformers = load_transformers
        self._transformers: Any = None
        self._documents = GigatokenPath(backend)

    @property
    def bos_token(self) -> str | None:
        return self._special.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._special.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of(self.pad_token)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_flat(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> tuple[np.ndarray, np.ndarray]:
        found = self._documents.encode_flat(texts, add_special_tokens)
        return to_flat(self.encode_batch(texts, add_special_tokens=add_special_tokens)) if found is None else found

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.backend.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=skip_special_tokens)

    def get_chat_template(self) -> str:
        template = self.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        if template is None:
            raise ValueError("the tokenizer has no chat template")
        return template

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        if self._transformers is None:
            if self._load_transformers is None:
                raise UserError("this type of tokenizer has no chat template; name a template with --prompt-type")
            self._transformers = self._load_transformers()
        return self._transformers.apply_chat_template(conversation, **options)

    def identity(self) -> str:
        parts = [self._content_hash, sorted(self._special.items()), self.chat_template]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def hash_of_files(*files: Path) -> str:
    """A hash of the contents of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
