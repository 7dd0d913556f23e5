"""MagistralTokenizer: the tekken.json of Mistral's models, read with mistral-common."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.tokenizers.base import to_flat
from mindspeed_llm.tasks.preprocess.tokenizers.rust_tokenizer import hash_of_files

_FILE = "tekken.json"
_BOS, _EOS, _PAD = "<s>", "</s>", "<pad>"


class MagistralTokenizer:
    """Wraps Mistral's tokenizer; with special tokens a text begins with its begin token, as transformers has it."""

    runs_in_threads = False
    chat_template: str | None = None

    def __init__(self, file: Path) -> None:
        try:
            from mistral_common.tokens.tokenizers.tekken import Tekkenizer
        except ImportError as error:
            raise UserError(
                "--tokenizer-type MagistralTokenizer needs the package mistral-common, which is not installed"
            ) from error
        file = file / _FILE if file.is_dir() else file
        if not file.is_file():
            raise UserError(f"{file} does not exist; MagistralTokenizer reads the {_FILE} of a model")
        self._model = Tekkenizer.from_file(file)
        self._hash = hash_of_files(file)

    @property
    def bos_token(self) -> str | None:
        return self._if_known(_BOS)

    @property
    def eos_token(self) -> str | None:
        return self._if_known(_EOS)

    @property
    def pad_token(self) -> str | None:
        return self._if_known(_PAD)

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of(_BOS)

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of(_EOS)

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of(_PAD)

    def _if_known(self, token: str) -> str | None:
        return token if self._model.is_special(token) else None

    def _id_of(self, token: str) -> int | None:
        return self._model.get_special_token(token) if self._model.is_special(token) else None

    def __len__(self) -> int:
        return self._model.n_words

    def get_vocab(self) -> dict[str, int]:
        return {self._model.id_to_piece(i): i for i in reversed(range(len(self)))}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._model.encode(text, bos=add_special_tokens, eos=False)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_flat(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> tuple[np.ndarray, np.ndarray]:
        return to_flat(self.encode_batch(texts, add_special_tokens=add_special_tokens))

    def encode_with_offsets(self, text: str) -> None:
        """The library gives no spans."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        policy = SpecialTokenPolicy.IGNORE if skip_special_tokens else SpecialTokenPolicy.KEEP
        return self._model.decode(np.asarray(ids, dtype=np.int64).tolist(), special_token_policy=policy)

    def get_chat_template(self) -> str:
        raise ValueError(f"a {_FILE} has no chat template")

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        raise UserError(f"a {_FILE} has no chat template; name one with --prompt-type, such as magistral")

    def identity(self) -> str:
        return f"tekken {self._hash}"
