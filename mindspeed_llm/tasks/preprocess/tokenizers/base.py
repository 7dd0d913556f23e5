"""What renderers and works need of a tokenizer, and the choice of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

TOKENIZER_KINDS = ("PretrainedFromHF", "GPTSentencePieceTokenizer", "GPT2BPETokenizer", "MagistralTokenizer")
"""The values of --tokenizer-type."""


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Which tokenizer to load; the fields are the flags of the preprocessing command."""

    kind: str = "PretrainedFromHF"
    """One of `TOKENIZER_KINDS`."""
    name_or_path: str | None = None
    """Directory (or hub id) of a Hugging Face tokenizer; for MagistralTokenizer the one that holds tekken.json."""
    model: str | None = None
    """The sentencepiece model file of GPTSentencePieceTokenizer, or tekken.json of MagistralTokenizer."""
    vocab_file: str | None = None
    """vocab.json of GPT2BPETokenizer."""
    merge_file: str | None = None
    """merges.txt of GPT2BPETokenizer."""
    use_fast: bool = True
    """False lets transformers load the tokenizer, with use_fast=False."""
    trust_remote_code: bool = False
    """Let transformers run code that comes with the tokenizer."""


class Tokenizer(Protocol):
    """Text to token ids and back; names and meaning are those of transformers.

    `runs_in_threads` says that encoding leaves other Python threads running and may be called from several threads at
    once. The tokens are None where the tokenizer has none.
    """

    runs_in_threads: bool

    @property
    def chat_template(self) -> str | Mapping[str, str] | None: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token(self) -> str | None: ...
    @property
    def pad_token(self) -> str | None: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        ...

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of one text; `add_special_tokens` adds the begin and end tokens that the tokenizer puts around texts."""
        ...

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text, each encoded on its own."""
        ...

    def encode_flat(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """The same as (ids of all texts end to end, length of each), int32: what takes the least time for documents."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Ids without special tokens, and the span of characters of each; None where the tokenizer knows no spans."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        ...

    def get_chat_template(self) -> str:
        """The chat template that conversations without tools use. Raises ValueError where there is none."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render a conversation as transformers does, with its arguments."""
        ...

    def identity(self) -> str:
        """A hash of everything that decides ids: it changes whenever ids can change."""
        ...


def to_flat(encoded: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(ids end to end, lengths) of a list of ids."""
    lengths = np.fromiter(map(len, encoded), dtype=np.int32, count=len(encoded))
    ids = np.empty(int(lengths.sum(dtype=np.int64)), dtype=np.int32)
    position = 0
    for item, length in zip(encoded, lengths.tolist(), strict=True):
        ids[position : position + length] = item
        position += length
    return ids, lengths
