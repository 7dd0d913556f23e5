"""What the two endpoints are asked: the fields of OpenAI's API, checked.

A field that would change the answer and is not supported is refused, and so is an unknown one: an answer that looks
right and is not what was asked for is worse than none. Fields that change nothing are ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.tasks.inference.bounds import REPETITION_PENALTY, SEED, TEMPERATURE
from mindspeed_llm.tasks.inference.generation import Sampling
from mindspeed_llm.tasks.inference.serve.errors import bad_field
from mindspeed_llm.tasks.inference.serve.fields import Fields, as_text, wrong_type
from mindspeed_llm.tasks.preprocess.records import Conversation, Message, UnusableRecord
from mindspeed_llm.tasks.preprocess.records.conversation import check_order

# OpenAI's default for completions; chats go on to the end of the context.
_DEFAULT_MAX_TOKENS = 16
_MOST_ANSWERS = 128
_MOST_PROMPTS = 1024
_MOST_STOPS = 64
_MOST_LOGPROBS = 20
_MOST_TOKENS = 2**31
# OpenAI's.
_HIGHEST_TEMPERATURE = 2.0

_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
    }
)
"""Fields of OpenAI's API that change no answer here."""
_COMMON = frozenset(
    {
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "n",
        "stop",
        "seed",
        "logprobs",
        "stream",
        "stream_options",
    }
)
_NOT_IMPLEMENTED = "this server has no such thing"
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0, 0.0), "use repetition_penalty"),
    "frequency_penalty": ((0, 0.0), "use repetition_penalty"),
    "logit_bias": (({},), _NOT_IMPLEMENTED),
}
"""Field -> (values that ask for nothing, why others are refused)."""
_UNSUPPORTED_COMPLETION: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "the model continues texts, it does not fill gaps"),
}
_UNSUPPORTED_CHAT: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "calls of tools are not read out of answers"),
    "tool_choice": (("none", "auto"), "calls of tools are not read out of answers"),
    "functions": (([],), "calls of tools are not read out of answers"),
    "function_call": (("none", "auto"), "calls of tools are not read out of answers"),
    "response_format": (({"type": "text"},), "answers are free text"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text"),
    "reasoning_effort": ((), _NOT_IMPLEMENTED),
    "verbosity": ((), _NOT_IMPLEMENTED),
    "web_search_options": ((), _NOT_IMPLEMENTED),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How answers are to be made, and given."""

    max_new_tokens: int | None
    """None: as many as the context has room for."""
    samplings: tuple[Sampling, ...]
    """One for each answer to a prompt; they differ in their seeds."""
    stop: tuple[str, ...]
    top_logprobs: int | None
    """Alternatives to name at each token; None: no logprobs at all."""
    stream: bool
    include_usage: bool


@dataclass(frozen=True, kw_only=True)
class AskedCompletion:
    """Texts, or token ids, to continue."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    """Put the prompt in front of the answer."""
    common: Asked


@dataclass(frozen=True, kw_only=True)
class AskedChat:
    """A conversation to go on with."""

    conversation: Conversation
    common: Asked


def parse_completion(fields: Fields, vocab_size: int) -> AskedCompletion:
    """The body of POST /v1/completions. Raises ApiError, which names the field."""
    _check_names(fields, {"prompt", "echo", "best_of"}, _UNSUPPORTED_COMPLETION)
    echo = fields.boolean("echo")
    max_new_tokens = fields.integer("max_tokens", 0 if echo else 1, _MOST_TOKENS)
    common = _common(
        fields,
        max_new_tokens=_DEFAULT_MAX_TOKENS if max_new_tokens is None else max_new_tokens,
        top_logprobs=fields.integer("logprobs", 0, _MOST_LOGPROBS),
    )
    count = len(common.samplings)
    fields.refuse("best_of", (count,), f"each answer is given; leave it out, or set it to n ({count})")
    return AskedCompletion(prompts=_prompts(fields.value("prompt"), vocab_size), echo=echo, common=common)


def parse_chat(fields: Fields) -> AskedChat:
    """The body of POST /v1/chat/completions. Raises ApiError, which names the field."""
    _check_names(fields, {"messages", "max_completion_tokens", "top_logprobs"}, _UNSUPPORTED_CHAT)
    limits = [fields.integer(name, 1, _MOST_TOKENS) for name in ("max_completion_tokens", "max_tokens")]
    top_logprobs = fields.integer("top_logprobs", 0, _MOST_LOGPROBS)
    wants_logprobs = fields.boolean("logprobs")
    if top_logprobs and not wants_logprobs:
        raise bad_field("top_logprobs", "set without logprobs; set logprobs to true as well")
    common = _common(
        fields,
        max_new_tokens=limits[0] if limits[0] is not None else limits[1],
        top_logprobs=(top_logprobs or 0) if wants_logprobs else None,
    )
    return AskedChat(conversation=_conversation(fields.value("messages")), common=common)


def _check_names(fields: Fields, own: set[str], unsupported: dict[str, tuple[tuple[Any, ...], str]]) -> None:
    refused = {**_UNSUPPORTED, **unsupported}
    fields.check_names(_COMMON | _IGNORED | own | refused.keys())
    for name, (harmless, why) in refused.items():
        fields.refuse(name, harmless, why)


def _common(fields: Fields, *, max_new_tokens: int | None, top_logprobs: int | None) -> Asked:
    stream = fields.boolean("stream")
    if fields.value("stream_options") is not None and not stream:
        raise bad_field("stream_options", "set without stream; leave it out, or set stream to true")
    options = fields.object("stream_options")
    # include_obfuscation pads chunks against who counts bytes on the wire; it changes no answer.
    options.check_names({"include_usage", "include_obfuscation"})
    count = fields.integer("n", 1, _MOST_ANSWERS) or 1
    seed = fields.integer("seed", int(SEED.low), int(SEED.high))
    first = secrets.randbits(63) if seed is None else seed
    return Asked(
        max_new_tokens=max_new_tokens,
        samplings=tuple(_sampling(fields, seed=_wrapped(first + number)) for number in range(count)),
        stop=_stop(fields.value("stop")),
        top_logprobs=top_logprobs,
        stream=stream,
        include_usage=options.boolean("include_usage"),
    )


def _wrapped(seed: int) -> int:
    """Within 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


def _sampling(fields: Fields, *, seed: int) -> Sampling:
    temperature = fields.number("temperature", TEMPERATURE.low, _HIGHEST_TEMPERATURE, 1.0, also=0.0)
    top_p = fields.number("top_p", 0.0, 1.0, 1.0)
    top_k = fields.integer("top_k", -1, _MOST_TOKENS) or 0
    penalty = fields.number("repetition_penalty", REPETITION_PENALTY.low, REPETITION_PENALTY.high, 1.0)
    # No share of the probability: the first token alone. (For `Sampling` 0 means all of them.)
    if temperature == 0.0 or top_p == 0.0:
        return Sampling(repetition_penalty=penalty, seed=seed)
    return Sampling(
        do_sample=True,
        repetition_penalty=penalty,
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        seed=seed,
    )


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list):
        raise wrong_type("stop", "text or a list of texts", value)
    if len(texts) > _MOST_STOPS:
        raise bad_field("stop", f"has {len(texts)} texts; expected at most {_MOST_STOPS}")
    found = tuple(as_text(text, "stop") for text in texts)
    if "" in found:
        raise bad_field("stop", "has an empty text, which every answer would begin with; leave it out")
    return found


def _prompts(value: Any, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    expected = "text, a list of texts, a list of token ids, or a list of such lists"
    if isinstance(value, str):
        return (as_text(value, "prompt"),)
    if not isinstance(value, list) or not value:
        raise wrong_type("prompt", expected, value)
    if all(_is_token(item) for item in value):
        return (_tokens(value, vocab_size),)
    if len(value) > _MOST_PROMPTS:
        raise bad_field("prompt", f"has {len(value)} prompts; expected at most {_MOST_PROMPTS}")
    if all(isinstance(item, str) for item in value):
        return tuple(as_text(item, "prompt") for item in value)
    if all(isinstance(item, list) and all(map(_is_token, item)) for item in value):
        return tuple(_tokens(item, vocab_size) for item in value)
    raise wrong_type("prompt", expected, value)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(value: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if wrong := [token for token in value if not 0 <= token < vocab_size]:
        raise bad_field("prompt", f"has the token {wrong[0]:.20g}; the model has tokens from 0 to {vocab_size - 1}")
    return tuple(value)


_MESSAGE_KEYS = ("role", "content", "reasoning_content")
# What OpenAI's client gives back of an answer, and lm-eval puts into questions. None of it reaches a template.
_MESSAGE_KEYS_IGNORED = ("name", "type", "refusal", "annotations", "audio", "reasoning")
_MESSAGE_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tool_calls": (([],), "calls of tools are not read out of answers"),
    "function_call": ((), "calls of tools are not read out of answers"),
    "tool_call_id": ((), "calls of tools are not read out of answers"),
}


def _conversation(value: Any) -> Conversation:
    if not isinstance(value, list) or not value:
        raise wrong_type("messages", "a list of messages", value)
    system, messages = "", []
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong_type(f"messages[{place}]", "an object", item)
        fields = Fields(item)
        fields.check_names({*_MESSAGE_KEYS, *_MESSAGE_KEYS_IGNORED, *_MESSAGE_UNSUPPORTED})
        for name, (harmless, why) in _MESSAGE_UNSUPPORTED.items():
            fields.refuse(name, harmless, why)
        role, content = fields.text("role"), _content(fields.value("content"), f"messages[{place}].content")
        if role in ("system", "developer") and place == 0:
            system = content
        elif role == "user":
            messages.append(Message("user", content))
        elif role == "assistant":
            messages.append(Message("assistant", content, reasoning=fields.text("reasoning_content") or ""))
        elif role in ("system", "developer"):
            raise bad_field(f"messages[{place}].role", f"{role!r} is possible for the first message only")
        else:
            raise bad_field(
                f"messages[{place}].role", f"expected system (first), user or assistant, found {item.get('role')!r:.60}"
            )
    try:
        check_order(messages, ends_with_reply=False, first_place=len(value) - len(messages) + 1)
    except UnusableRecord as error:
        raise bad_field("messages", str(error)) from error
    return Conversation(messages, system=system)


def _content(value: Any, name: str) -> str:
    if not isinstance(value, list):
        return as_text(value, name)
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise bad_field(name, "has a part that is no text; the model reads text only")
        texts.append(as_text(part.get("text"), name))
    return "".join(texts)
