"""What the flags say about answers, in the words of a generator."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.generation import Request, Sampling
from mindspeed_llm.tasks.inference.prompt_format import PromptFormat

_LOG = logging.getLogger("mindspeed_llm")
SAMPLING_TASKS = ("do_sample", "beam_search_with_sampling", "chat")


def sampling_of(args: Namespace, task: str, number: int = 0) -> Sampling:
    """How tokens are chosen in a task.

    Args:
        number: of the prompt in the run; each has random numbers of its own, so that an answer does not depend on what
            else is asked, nor on the ranks.
    """
    if task not in SAMPLING_TASKS:
        return Sampling(repetition_penalty=args.repetition_penalty)
    return Sampling(
        do_sample=True,
        repetition_penalty=args.repetition_penalty,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed + number,
    )


def request_of(
    args: Namespace,
    lm: CausalLM,
    prompt: str | Sequence[int],
    task: str,
    *,
    number: int = 0,
    template: PromptFormat | None = None,
) -> Request:
    """What the model is asked for a prompt: a text that is continued as it is, or token ids.

    Raises:
        UserError: the prompt leaves no room for an answer.
    """
    ids = lm.encode(prompt) if isinstance(prompt, str) else list(prompt)
    stop = (*args.stop, *(template.stop_words if template is not None else ()))
    return lm.request(
        ids,
        max_new_tokens=answer_limit(args, len(ids), lm.max_length),
        stop=stop,
        sampling=sampling_of(args, task, number),
    )


def answer_limit(args: Namespace, prompt_length: int, max_length: int) -> int:
    """Tokens that the answer to a prompt may have: --max-new-tokens, --max-length, and the positions of the model.

    Raises:
        UserError: --max-length leaves none.
    """
    return min(_asked_limit(args, prompt_length), max(max_length - prompt_length, 1))


def tell_of_positions(args: Namespace, lm: CausalLM, prompt_lengths: Sequence[int]) -> None:
    """Say in a line of the log how many of the answers may end before their limit, as the model has no more positions.

    Args:
        prompt_lengths: tokens of each prompt, for which `answer_limit` leaves room.
    """
    from mindspeed_llm.platform import distributed

    cut = sum(length + _asked_limit(args, length) > lm.max_length for length in prompt_lengths)
    if cut and distributed.is_rank_zero():
        _LOG.warning(
            "the model has %d positions for a prompt with its answer: %s where these are used up, before their limit "
            "of tokens",
            lm.max_length,
            f"{cut} of {len(prompt_lengths)} answers end" if len(prompt_lengths) > 1 else "answers end",
        )


def _asked_limit(args: Namespace, prompt_length: int) -> int:
    """What the flags alone say of the length of an answer."""
    limits = []
    if args.max_length is None or "max_new_tokens" in args.given:
        limits.append(args.max_new_tokens)
    if args.max_length is not None:
        if args.max_length <= prompt_length:
            raise UserError(
                f"--max-length {args.max_length}: the prompt alone has {prompt_length} tokens, which leaves none for "
                "an answer; raise it, or give --max-new-tokens instead"
            )
        limits.append(args.max_length - prompt_length)
    return min(limits)
