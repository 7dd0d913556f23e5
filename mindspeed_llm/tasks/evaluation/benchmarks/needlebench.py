"""NeedleBench, one needle: a sentence is hidden in a long text and asked for (Li et al. 2024, arXiv:2407.11963).

Which texts surround which needle is drawn as OpenCompass draws it. Lengths are counted in tokens of the model that is
measured, so that its whole window is used; they are those of prompts with answers of the usual length. The words around
the text are our own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Document, Fields, Reading, Subject, Write
from mindspeed_llm.tasks.evaluation.documents import documents_of
from mindspeed_llm.tasks.evaluation.filters import as_it_is
from mindspeed_llm.tasks.evaluation.rows import Row, read_jsonl

NAME = "needlebench"
_LOG = get_logger("evaluation")
DEPTHS = tuple(range(0, 101, 10))
"""Where the needle is hidden, in per cent of the text."""
_REPEATS = 10
_CLASSES = (4, 8, 32, 128, 200, 256, 512, 1000)
"""Windows, in thousands of tokens, that texts are made for."""
_PARTS = 4
_ANSWER_TOKENS = 64
_NEEDLES = "needles.jsonl"


@dataclass(frozen=True)
class _Language:
    code: str
    in_files: str
    haystack: str
    before: str
    between: str
    after: str


_LANGUAGES = (
    _Language("en", "English", "PaulGrahamEssays.jsonl", "Read this text.\n\n", "\n\nQuestion: ", "\nAnswer:"),
    _Language("zh", "Chinese", "zh_finance.jsonl", "请阅读以下文本。\n\n", "\n\n问题：", "\n回答："),
)


def load(path: Path) -> tuple[Subject, ...]:
    """The needles of both languages (as documents), and the texts to hide them in (as examples); `fit` joins them.

    Raises:
        UserError: a file is not there, or a row of it is malformed.
    """
    folder = path.parent if path.is_file() else path
    needles = _file(folder, _NEEDLES)
    rows = list(read_jsonl(needles))
    found = []
    for language in _LANGUAGES:
        haystack = _file(folder, language.haystack)
        own = [row for row in rows if row.text("language") == language.in_files]
        if not own:
            raise UserError(
                f"{needles} holds no needle whose field 'language' is {language.in_files!r}. "
                "Take it from the benchmark's own distribution again."
            )
        found.append(
            Subject(
                name=language.code,
                documents=documents_of(own, needles, language.code, _needle),
                shots=documents_of(
                    read_jsonl(haystack), haystack, language.code, lambda row: {"text": row.text("text")}
                ),
            )
        )
    return tuple(found)


def _file(folder: Path, name: str) -> Path:
    file = folder / name
    if not file.is_file():
        raise UserError(
            f"--task-data-path: {file} does not exist. Give the folder of NeedleBench, with {_NEEDLES} and "
            f"{' and '.join(language.haystack for language in _LANGUAGES)}."
        )
    return file


def _needle(row: Row) -> Fields:
    return {
        "needle": row.text("needle"),
        "question": row.text("retrieval_question"),
        # The distribution's name for the words that a right answer holds.
        "keyword": row.text("arg2"),
    }


def lengths_for(max_length: int, answer_tokens: int = _ANSWER_TOKENS) -> tuple[int, ...]:
    """The lengths of prompts and usual answers for a model with so many positions: quarters of the widest window that
    it has, or of its own where even the smallest is wider. Where answers may be longer than usual, prompts are not
    shorter for it, except those that would leave them no room.
    """
    fitting = [size * 1000 for size in _CLASSES if size * 1000 <= max_length]
    widest = fitting[-1] if fitting else max_length
    longest = max_length - max(0, answer_tokens - _ANSWER_TOKENS)
    return tuple(dict.fromkeys(min(widest * part // _PARTS, longest) for part in range(1, _PARTS + 1)))


def fit(
    subjects: tuple[Subject, ...], encode: Callable[[str], Sequence[int]], max_length: int, answer_tokens: int
) -> tuple[Subject, ...]:
    """One subject for each language and length, with a document for each depth and repetition. Lengths that the texts
    of a language do not fill are left out, and a warning says so.

    Args:
        subjects: what `load` gave.
        encode: the model's tokenizer.
        max_length: the model's positions.
        answer_tokens: the most that an answer has.

    Raises:
        UserError: the window is too small to hide anything in, or the texts of a language fill no length.
    """
    languages = {language.code: language for language in _LANGUAGES}
    found = []
    for subject in subjects:
        language = languages[subject.name]
        texts = dict.fromkeys(str(shot.fields["text"]) for shot in subject.shots)
        sizes = {text: len(encode(f"{text}\n")) for text in texts}
        tokens = sum(sizes[str(shot.fields["text"])] for shot in subject.shots)
        lengths = lengths_for(max_length, answer_tokens)
        filled = [length for length in lengths if length - _ANSWER_TOKENS <= tokens]
        if not filled:
            raise UserError(
                f"{language.haystack} has {tokens} tokens of this model, which do not fill the shortest prompt, one of "
                f"{lengths[0]}; take it from the benchmark's own distribution again"
            )
        if len(filled) < len(lengths):
            _warn_of_short_texts(language.haystack, tokens, lengths[len(filled) :])
        for length in filled:
            name = f"{subject.name} {length}"
            found.append(
                Subject(name=name, documents=tuple(_documents(name, subject, language, length, sizes, encode)))
            )
    return tuple(found)


def _warn_of_short_texts(file: str, tokens: int, lengths: Sequence[int]) -> None:
    from mindspeed_llm.platform import distributed

    if distributed.is_rank_zero():
        _LOG.warning(
            "%s: the %d tokens of %s do not fill prompts of %s, which are left out",
            NAME,
            tokens,
            file,
            " and ".join(map(str, lengths)),
        )


def _documents(
    name: str,
    subject: Subject,
    language: _Language,
    length: int,
    sizes: Mapping[str, int],
    encode: Callable[[str], Sequence[int]],
) -> Iterator[Document]:
    texts = [str(shot.fields["text"]) for shot in subject.shots]
    for repeat in range(_REPEATS):
        random.Random(repeat).shuffle(texts)
        needle = random.Random(repeat).choice(subject.documents)
        around = "\n".join([language.before, str(needle.fields["needle"]), _question(language, needle.fields)])
        room = length - _ANSWER_TOKENS - len(encode(around)) - 1
        if room < 1:
            raise UserError(
                f"{NAME}: {length} tokens hold no text beside the question of {needle.place}; the model's window is "
                "too small for this benchmark, or for answers as long as --max-new-tokens allows"
            )
        hay = _cut(texts, sizes, room, encode)
        for place, depth in enumerate(DEPTHS):
            yield Document(
                subject=name,
                index=repeat * len(DEPTHS) + place,
                place=needle.place,
                fields={**needle.fields, "depth": depth, "text": hide(str(needle.fields["needle"]), hay, depth)}
                | {"language": language.code},
            )


def _cut(texts: Sequence[str], sizes: Mapping[str, int], room: int, encode: Callable[[str], Sequence[int]]) -> str:
    """The texts, one after the other, as far as there is room for their tokens."""
    taken: list[str] = []
    for text in texts:
        if sizes[text] > room:
            taken.append(_beginning(text, room, encode))
            break
        taken.append(text)
        room -= sizes[text]
    return "\n".join(taken)


def _beginning(text: str, room: int, encode: Callable[[str], Sequence[int]]) -> str:
    """The longest beginning of a text whose tokens fit, by halving."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if len(encode(text[:middle])) <= room:
            low = middle
        else:
            high = middle - 1
    return text[:low]


def hide(needle: str, hay: str, depth: int) -> str:
    """The text with the needle on a line of its own after `depth` per cent of its characters, between two words."""
    place = len(hay) * depth // 100
    if 0 < place < len(hay):
        blanks = [found for found in (hay.rfind(" ", 0, place), hay.rfind("\n", 0, place)) if found >= 0]
        # Chinese has no blanks between words.
        place = max(blanks) if blanks and place - max(blanks) < 40 else place
    return f"{hay[:place]}\n{needle}\n{hay[place:]}"


def _question(language: _Language, fields: Fields) -> str:
    return f"{language.between}{fields['question']}{language.after}"


def _prompt(fields: Fields) -> str:
    language = next(language for language in _LANGUAGES if language.code == fields["language"])
    return f"{language.before}{fields['text']}{_question(language, fields)}"


def _holds(answer: str, keyword: str) -> bool:
    return keyword in answer


BENCHMARK = Benchmark(
    name=NAME,
    version="2",
    load=load,
    fit=fit,
    prompt=_prompt,
    target=lambda fields: str(fields["keyword"]),
    answer=Write(
        stop=(),
        max_new_tokens=_ANSWER_TOKENS,
        readings=(Reading(name="keyword", extract=as_it_is, matches=_holds),),
    ),
    headline="keyword",
    has_examples=False,
)
