"""Splitting a text in sentences, with the Punkt tokenizer of nltk and its data for English."""

from collections.abc import Callable

from mindspeed_llm.errors import UserError

SentenceSplitter = Callable[[str, bool], list[str]]
"""(text, whether sentences keep the white space that follows them) -> sentences, at least one."""

_LANGUAGE = "english"


def load_sentence_splitter() -> SentenceSplitter:
    """Load nltk's Punkt data, which is plain text: nothing is unpickled, and nothing is fetched.

    Raises UserError that says what to install where nltk or its data is missing.
    """
    try:
        from nltk.tokenize.punkt import PunktTokenizer
    except ImportError as error:
        raise UserError(
            "--split-sentences needs the package nltk (3.9 or newer); install it: pip install nltk"
        ) from error
    try:
        punkt = PunktTokenizer(_LANGUAGE)
    except LookupError as error:
        raise UserError(
            "--split-sentences needs nltk's data `punkt_tab`, which is not on this machine; install it with "
            "`python -m nltk.downloader punkt_tab`, or unpack it in a folder tokenizers/ under NLTK_DATA"
        ) from error

    def split(text: str, keep_white_space: bool) -> list[str]:
        spans = list(punkt.span_tokenize(text))
        if not keep_white_space:
            return [text[start:end].strip() for start, end in spans] or [text]
        starts = [0, *(start for start, _ in spans[1:])]
        return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]

    return split
