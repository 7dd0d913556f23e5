"""GPTSentencePieceTokenizer: a sentencepiece model file, read with sentencepiece itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.tokenizers.base import to_flat
from mindspeed_llm.tasks.preprocess.tokenizers.rust_tokenizer import hash_of_files


class SentencePieceTokenizer:
    """Wraps a sentencepiece model; it puts nothing around texts, and control pieces in a text stay text."""

    runs_in_threads = False
    chat_template: str | None = None

    def __init__(self, model_file: Path) -> None:
        import sentencepiece

        if not model_file.is_file():
            raise UserError(f"--tokenizer-model {model_file} does not exist")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        except RuntimeError as error:
            raise UserError(f"--tokenizer-model {model_file} is not a sentencepiece model: {error}") from error
        self._hash = hash_of_files(model_file)

    @property
    def bos_token(self) -> str | None:
        return self._piece(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return self._piece(self.eos_token_id)

    @property
    def pad_token(self) -> str | None:
        return self._piece(self.pad_token_id)

    @property
    def bos_token_id(self) -> int | None:
        return _or_none(self._model.bos_id())

    @property
    def eos_token_id(self) -> int | None:
        return _or_none(self._model.eos_id())

    @property
    def pad_token_id(self) -> int | None:
        return _or_none(self._model.pad_id())

    def _piece(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._model.id_to_piece(token_id)

    def __len__(self) -> int:
        return self._model.get_piece_size()

    def get_vocab(self) -> dict[str, int]:
        return {self._model.id_to_piece(i): i for i in range(len(self))}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        # One thread: the engine runs several processes.
        return self._model.encode(list(texts), num_threads=1) if texts else []

    def encode_flat(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> tuple[np.ndarray, np.ndarray]:
        return to_flat(self.encode_batch(texts, add_special_tokens=add_special_tokens))

    def encode_with_offsets(self, text: str) -> None:
        """The library gives no spans."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        plain: list[int] = np.asarray(ids, dtype=np.int64).tolist()
        if not skip_special_tokens:
            return _with_control_pieces(self._model, plain)
        return self._model.decode([i for i in plain if not self._model.is_control(i)])

    def get_chat_template(self) -> str:
        raise ValueError("a sentencepiece model has no chat template")

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        raise UserError("a sentencepiece model has no chat template; name a template with --prompt-type")

    def identity(self) -> str:
        return f"sentencepiece {self._hash}"


def _or_none(token_id: int) -> int | None:
    return None if token_id < 0 else token_id


def _with_control_pieces(model: Any, ids: list[int]) -> str:
    """Decode with control pieces, which sentencepiece leaves out, written as their names."""
    text, run = "", list[int]()
    for token_id in ids:
        if model.is_control(token_id):
            text += model.decode(run) + model.id_to_piece(token_id)
            run = []
        else:
            run.append(token_id)
    return text + model.decode(run)
