"""Prompts from training data: the part of a sample before its first target, and what the data answer.

labels         - - - A A A - - B B
ids            a b c A A A d e B B
               prompt|reference
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX

Text = tuple[np.ndarray, np.ndarray]
"""(ids, labels) of one document, [n] each; labels are not shifted, -100 stands for no target."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids of a prompt, and of the answer that the data have to it."""

    ids: list[int]
    reference: list[int]


def prompt_of(text: Text, stop_ids: Collection[int]) -> Prompt | None:
    """The prompt of a document, and the run of targets behind it; None where it has none.

    Of a text that is target from its beginning on, the first half is the prompt; it ends where one of `stop_ids` does.
    """
    ids, labels = text
    is_target = labels != IGNORE_INDEX
    if not is_target.any():
        return None
    start = int(is_target.argmax())
    ends = np.flatnonzero(~is_target[start:])
    end = start + int(ends[0]) if len(ends) else len(ids)
    # The first token is never predicted, so that labels may lack it.
    if start <= 1:
        stops = np.flatnonzero(np.isin(ids[:end], list(stop_ids)))
        end = int(stops[0]) if len(stops) else end
        start = end // 2
    if not start or start == end:
        return None
    return Prompt(ids=ids[:start].tolist(), reference=ids[start:end].tolist())


def cut_at(prompts: Iterable[Prompt], stop_ids: Collection[int]) -> list[Prompt]:
    """The prompts with references up to the first of `stop_ids`, also where that is the first token."""
    found = []
    for prompt in prompts:
        size = next((n for n, token in enumerate(prompt.reference) if token in stop_ids), len(prompt.reference))
        found.append(Prompt(ids=prompt.ids, reference=prompt.reference[:size]))
    return found


def first_prompts(texts: Iterable[Text], count: int, *, max_length: int, stop_ids: Collection[int]) -> list[Prompt]:
    """The first `count` prompts of documents that leave room for an answer within `max_length` tokens; fewer where
    there are no more.
    """
    found: list[Prompt] = []
    if not count:
        return found
    for text in texts:
        prompt = prompt_of(text, stop_ids)
        if prompt is not None and len(prompt.ids) < max_length:
            found.append(prompt)
            if len(found) == count:
                break
    return found
