"""What a model answers to a few prompts, asked at every evaluation: a look at progress that is no number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindspeed_llm.tasks.inference.greedy import Answer, NextTokens, greedy_answers
from mindspeed_llm.tasks.inference.prompts import Prompt, Text, cut_at, first_prompts
from mindspeed_llm.tasks.inference.stopping import ends_of
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer


def build_eval_samples(
    texts: Mapping[str | None, Iterable[Text]],
    count: int,
    *,
    tokenizer: Tokenizer,
    stop_ids: Collection[int],
    next_tokens: NextTokens,
    modules: Sequence[nn.Module],
    max_new_tokens: int,
    max_length: int,
) -> EvalSamples | None:
    """The first `count` prompts of each evaluation set; None where no set has any.

    Args:
        texts: name of an evaluation set -> its documents.
        stop_ids: what ends answers, besides what replies of the data end with.
        modules: see `EvalSamples`, as for all others.
    """
    prompts = {
        name: first_prompts(documents, count, max_length=max_length, stop_ids=stop_ids)
        for name, documents in texts.items()
    }
    if not any(prompts.values()):
        return None
    stops = frozenset(stop_ids) | ends_of((item.reference for items in prompts.values() for item in items), tokenizer)
    return EvalSamples(
        prompts={name: cut_at(items, stops) for name, items in prompts.items()},
        next_tokens=next_tokens,
        modules=modules,
        decode=tokenizer.decode,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        stop_ids=stops,
    )


@dataclass(frozen=True, kw_only=True)
class EvalSamples:
    """Asks the same prompts each time. Training goes on as if nobody had asked: modules have their modes back, no
    gradient is made, no random number drawn.
    """

    prompts: Mapping[str | None, Sequence[Prompt]]
    """Name of an evaluation set (None where there is one) -> its prompts."""
    next_tokens: NextTokens
    modules: Sequence[nn.Module]
    """What `next_tokens` runs on this rank."""
    decode: Callable[[Sequence[int]], str]
    max_new_tokens: int
    max_length: int
    stop_ids: Collection[int]

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """The answers to prompts of any kind. A collective."""
        with _evaluating(self.modules), torch.no_grad():
            return greedy_answers(
                prompts,
                self.next_tokens,
                max_new_tokens=self.max_new_tokens,
                max_length=self.max_length,
                stop_ids=self.stop_ids,
            )

    def rows(self) -> list[dict[str, Any]]:
        """One row for each prompt: `name` of the set where there are several, `index`, `prompt`, `answer`, `reference`,
        `finish_reason` (stop, length, nan). A collective: all ranks call it at the same place.
        """
        asked = [(name, index, item) for name, items in self.prompts.items() for index, item in enumerate(items)]
        answers = self.answers([prompt.ids for _, _, prompt in asked])
        return [
            ({} if name is None else {"name": name})
            | {
                "index": index,
                "prompt": self.decode(prompt.ids),
                "answer": self.decode(answer.ids),
                "reference": self.decode(prompt.reference),
                "finish_reason": answer.finish_reason,
            }
            for (name, index, prompt), answer in zip(asked, answers, strict=True)
        ]


@contextlib.contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode, and behind it the mode that each module had: some may be frozen in one of their own."""
    modes = [(inner, inner.training) for module in modules for inner in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode
