"""The optional package gigatoken in the place of `tokenizers`, for byte-level BPE vocabularies: the same ids, sooner.

It is taken only where every step is one of those that both libraries are known to do alike, and where a sample of text
gives the same ids as `tokenizers` does; single texts that it might treat in another way go to `tokenizers`. So the ids
never depend on whether it is installed.
"""

import importlib.util
import json
import logging
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_LOG = logging.getLogger("mindspeed_llm")

FIRST_CHARS = 1 << 20
"""Loading takes as long as so many characters take with `tokenizers`: it is put off until they have been seen."""
_CACHE_BYTES = 48 << 20
"""gigatoken keeps every word that it has seen. When the process has grown by so much, it is loaded anew."""
_CHECKED_SPECIALS = 200
_NOTHING = np.zeros(0, np.uint32)
_PLANES_END = 0x32400


class GigatokenPath:
    """Encodes documents for a backend of `tokenizers`, or says that it does not.

    `backend` must not change any more. Several threads may call it at once.
    """

    def __init__(self, backend: "Backend") -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._seen_chars = 0
        self._encode: Callable[[str], np.ndarray] | None = None
        self._is_off = importlib.util.find_spec("gigatoken") is None
        self._description = ""
        self._normalizer: Any = None
        self._around = (_NOTHING, _NOTHING)
        self._bytes_at_load = 0

    def encode_flat(self, texts: Sequence[str], add_special_tokens: bool) -> tuple[np.ndarray, np.ndarray] | None:
        """(ids end to end, lengths) of texts, int32; None where `tokenizers` is to do it.

        Raises ValueError for a text that is not valid Unicode.
        """
        encode = self._ready(texts)
        if encode is None:
            return None
        before, after = self._around if add_special_tokens else (_NOTHING, _NOTHING)
        parts: list[np.ndarray] = [_NOTHING]
        lengths = np.empty(len(texts), np.int32)
        for number, text in enumerate(texts):
            ids = self._encode_text(encode, text)
            parts += (before, ids, after) if len(before) or len(after) else (ids,)
            lengths[number] = len(before) + len(ids) + len(after)
        return np.concatenate(parts).view(np.int32), lengths

    def _encode_text(self, encode: Callable[[str], np.ndarray], text: str) -> np.ndarray:
        if not text.isascii() and not (_is_known(text) and self._is_normal(text)):
            # The libraries have other versions of Unicode: they differ in what is a letter, and in the order of marks.
            return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.uint32)
        try:
            return encode(text)
        except TypeError as error:
            raise ValueError("the text is not valid Unicode") from error

    def _is_normal(self, text: str) -> bool:
        return self._normalizer is None or self._normalizer.normalize_str(text) == text

    def _ready(self, texts: Sequence[str]) -> Callable[[str], np.ndarray] | None:
        if self._is_off:
            return None
        with self._lock:
            if self._is_off:
                # Another thread has found out meanwhile.
                return None
            if self._encode is None:
                self._seen_chars += sum(map(len, texts))
                if self._seen_chars >= FIRST_CHARS:
                    self._load()
            else:
                now = _process_bytes()
                # The one before may have been freed only after this one was loaded.
                self._bytes_at_load = min(self._bytes_at_load, now)
                if now - self._bytes_at_load > _CACHE_BYTES:
                    self._encode = None
                    self._encode = self._new_encode()
            return self._encode

    def _load(self) -> None:
        """Take gigatoken where it gives the same ids, else never ask again."""
        try:
            self._prepare()
            _check_sample(self._backend, self._encode_sample)
        except _Unfit as reason:
            self._is_off, self._encode = True, None
            _LOG.info("the package gigatoken does not fit this tokenizer (%s); tokenizers makes the same ids", reason)
        else:
            _LOG.info("tokenizing with gigatoken")

    def _prepare(self) -> None:
        description = json.loads(self._backend.to_str())
        _check_parts(description)
        before, after = _around(self._backend)
        self._around = (np.array(before, np.uint32), np.array(after, np.uint32))
        self._normalizer = self._backend.normalizer
        # A normalizer changes nothing in the texts that get here.
        self._description = json.dumps(description | {"normalizer": None, "post_processor": None})
        self._encode = self._new_encode()

    def _new_encode(self) -> Callable[[str], np.ndarray]:
        from gigatoken.gigatoken_rs import load_hf_json

        try:
            encode = load_hf_json(self._description).encode
        except Exception as error:  # whatever its own checks raise
            raise _Unfit(str(error).splitlines()[0]) from error
        self._bytes_at_load = _process_bytes()
        return encode

    def _encode_sample(self, text: str) -> list[int]:
        assert self._encode is not None
        return [*self._around[0].tolist(), *self._encode_text(self._encode, text).tolist(), *self._around[1].tolist()]


class _Unfit(Exception):
    """gigatoken is not known to give the same ids; the text says why."""


def _check_parts(description: dict[str, Any]) -> None:
    """Raise _Unfit unless every step of the tokenizer is one that is known to be the same."""
    model = description["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise _Unfit("the vocabulary is not one of byte-level BPE")
    unusual = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if any(model.get(name) for name in unusual):
        raise _Unfit("its BPE has settings beyond vocabulary and merges")
    if (description["normalizer"] or {"type": "NFC"}) != {"type": "NFC"}:
        raise _Unfit("its normalizer is not NFC")
    steps = description["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    *splits, last = steps
    if last.get("type") != "ByteLevel" or last["add_prefix_space"] or any(step["type"] != "Split" for step in splits):
        raise _Unfit("its words are not split in one of the known ways")
    for token in description["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise _Unfit(f"its token {token['content']!r} takes white space or words around it into account")


def _around(backend: "Backend") -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and after a text."""
    bare, full = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    for begin in range(len(full) - len(bare) + 1):
        if full[begin : begin + len(bare)] == bare:
            return full[:begin], full[begin + len(bare) :]
    raise _Unfit("it changes the tokens of a text")


def _check_sample(backend: "Backend", encode: Callable[[str], list[int]]) -> None:
    """Raise _Unfit where a text of the sample gives other ids."""
    for text in sample(backend):
        if encode(text) != backend.encode(text, add_special_tokens=True).ids:
            raise _Unfit(f"it gives other ids for {text[:40]!r}")


def sample(backend: "Backend") -> Iterator[str]:
    """Texts that pull tokenizers apart: scripts, digits, white space, marks, control characters, special tokens."""
    yield from _SAMPLE
    # Every script has characters among these; each one stands at the places where words begin and end.
    points = [point for point in range(0x20, _PLANES_END, 53) if not 0xD800 <= point < 0xE000]
    for start in range(0, len(points), 200):
        yield "".join(f"a{chr(c)} {chr(c)}1{chr(c)}\n{chr(c)}{chr(c)}'s " for c in points[start : start + 200])
    added = [token.content for _, token in sorted(backend.get_added_tokens_decoder().items())]
    for content in added[:_CHECKED_SPECIALS] + added[-_CHECKED_SPECIALS:]:
        yield f"a{content}b {content} {content}{content}\n{content}1 {content[:-1]} {content[1:]}"


_SAMPLE = (
    "", " ", "  ", "\n", "\r\n\r\n \n", "\t\t a\t", " leading and trailing ", "a  b   c    d", "\n\n\n  next\r\nend \n",
    "I'll we've she'd it's they're I'm don't DON'T I'LL 'S 's'T ' s 'ſ", "word" * 100, "!" * 70, " " * 70, "\n" * 40,
    "1 12 123 1234 12345678901 3.14 1,000 0x1F 2e-5 ½ ² ٣٤ 五", "9" * 70, "ü" * 40, "的" * 40,
    "camelCase snake_case SCREAMING_CASE kebab-case foo.bar(baz)[0]->x::y != z && !w || ~v ^ u",
    "https://example.org/a%20b?c=d&e=#f <a href=\"x\">y</a> {'k': [1, null]} \\n \\\\ `` ``` $$ ## -- ... ?!",
    "def f(x):\n    if x:\n\treturn  x  # no\n\n", "Straße ÆØÅ ﬁ naïve café Å \u212b K \u212a",
    "e\u0301 e\u0327\u0301 \u1e9b\u0323 \u1112\u1161\u11ab", "Ελληνικά кириллица עברית العربية हिन्दी ไทย ქართული አማርኛ",
    "한국어 日本語 ひらがな カタカナ 中文，标点。「引号」", "🙂🤖👩\u200d👩\u200d👧🇩🇪 \u2603\ufe0f",
    "\U0001f44d\U0001f3fd 𝒳𝔘 𠀋", "\u200b\u200c\u200e\ufeff\u00a0\u2003\u3000\u2028\u2029\x85\x0b\x0c",
    "\x00\x01\x07\x1b[0m\x7f\ufffd\uffff\ue000",
)  # fmt: skip


@cache
def _unknown_points() -> np.ndarray:
    """For each code point whether Python's version of Unicode does not know it (what lies behind the planes in use
    counts as unknown).
    """
    unknown = np.ones(0x110000, dtype=bool)
    unknown[:_PLANES_END] = [unicodedata.category(chr(point)) == "Cn" for point in range(_PLANES_END)]
    return unknown


def _is_known(text: str) -> bool:
    """Whether all characters are older than either library, so that both know the same about them."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return not _unknown_points()[points].any()


def _process_bytes() -> int:
    """Memory of this process."""
    import psutil

    return psutil.Process().memory_info().rss
