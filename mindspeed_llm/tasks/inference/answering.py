"""The ways to answer that --task names."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence

from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.generation import Completion, Request

TITLES = {
    "greedy": "Greedy Search",
    "do_sample": "Do Sample",
    "beam_search": "Beam Search",
    "beam_search_with_sampling": "Beam Search with Sampling",
}


def answer(
    args: Namespace,
    lm: CausalLM,
    requests: Sequence[Request],
    task: str,
    *,
    on_done: Callable[[int, Completion], None] | None = None,
) -> list[Completion]:
    """The answers to requests that were made for `task`, in their order (a collective of the copy).

    Args:
        on_done: called with the place of a request and its answer as soon as it has ended.
    """
    if not task.startswith("beam_search"):
        return lm.generate(requests, on_done=on_done)
    answers = []
    for place, request in enumerate(requests):
        found = lm.beam_search(
            request,
            args.num_beams,
            length_penalty=args.length_penalty,
            sample=task == "beam_search_with_sampling",
        )
        answers.append(found)
        if on_done is not None:
            on_done(place, found)
    return answers
