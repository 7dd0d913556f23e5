"""Marks of templates, such as <|im_start|>, that a tokenizer does not know as one token and would split as words."""

import re

from mindspeed_llm.tasks.preprocess.layouts import RenderOptions, make_layout
from mindspeed_llm.tasks.preprocess.once import warn_once
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import Template
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer

# Forms that models have as tokens. Others, such as [INST] or "### Instruction:", are plain text in some models.
_MARK = re.compile(r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|<(?:start|end)_of_turn>|<reserved_\d+>|</?role>")
_SAMPLE = Conversation(
    [Message("user", "q"), Message("assistant", "a"), Message("user", "q"), Message("assistant", "a")], system="s"
)


def split_marks(template: Template, tokenizer: Tokenizer) -> list[str]:
    """The marks that every conversation of the template has and the tokenizer takes for ordinary text."""
    turns = make_layout(template, RenderOptions()).pieces(_SAMPLE)
    texts = [piece for source, target, _ in turns for piece in (*source, *target) if isinstance(piece, str)]
    marks = dict.fromkeys(mark for text in texts for mark in _MARK.findall(text))
    return [mark for mark in marks if not _is_token(mark, tokenizer)]


def warn_of_split_marks(template: Template, tokenizer: Tokenizer) -> None:
    """Warn once where the tokenizer splits marks of the template."""
    marks = split_marks(template, tokenizer)
    if marks:
        warn_once(
            f"template {template.name!r}: the tokenizer has no token for {', '.join(marks)}, and will split it like "
            "ordinary text; choose the template that the model was trained with, unless the model is to learn it anew"
        )


def _is_token(mark: str, tokenizer: Tokenizer) -> bool:
    ids = tokenizer.encode(mark, add_special_tokens=False)
    # Some tokenizers put a space in front of every text.
    return len(ids) == 1 or tokenizer.get_vocab().get(mark) in ids
