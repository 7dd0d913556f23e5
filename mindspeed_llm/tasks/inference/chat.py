"""A conversation on the terminal: questions are typed, replies appear as they are made."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import write_durably
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.generation import Completion, Request
from mindspeed_llm.tasks.inference.prompt_format import PromptFormat, prompt_format
from mindspeed_llm.tasks.inference.settings import request_of, tell_of_positions
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.valid_text import why_invalid

_LOG = logging.getLogger("mindspeed_llm")
ASKING = "You >> "
REPLYING = "MindSpeed-LLM: "
WAITING_S = 60.0
"""Rank 0 lets the others hear of it so often while nothing is typed."""
_EXIT = ("/exit", "/quit", "q", "quit", "exit")
_CLEAR = ("/clear", "/new", "clear", "new")
_HELP = "/clear begins anew, /save FILE writes the conversation, /exit ends (so do clear, new, q, quit, exit)"
_TAGS = ("<think>", "</think>")
_TASK = "chat"


@dataclass
class History:
    """What was said, of which the model is shown the last turns."""

    turns: int
    """Questions with their replies that the model is shown, besides the new question."""
    messages: list[Message] = field(default_factory=list)

    def shown(self, dropped: int = 0) -> list[Message]:
        """The last turns without the oldest `dropped` of them."""
        count = min(self.turns, len(self.messages) // 2) - dropped
        return self.messages[-2 * count :] if count > 0 else []


def chat(args: Namespace, lm: CausalLM) -> int:
    """Talk until the user ends it (a collective: rank 0 reads, all ranks compute); returns the exit code.

    Ctrl-C ends a reply; at the question it ends the conversation, as the end of the input does.
    """
    template = prompt_format(args, lm.tokenizer, is_chat=True)
    _LOG.info(
        "a conversation in %s; %s",
        "plain text, as no chat template is named" if template is None else template.name,
        _HELP,
    )
    tell_of_positions(args, lm, [1])
    history, number = History(args.history_turns), 0
    while (question := _shared(_read)) is not None:
        words = question.strip().split(maxsplit=1)
        if not words:
            continue
        if question.strip() in _EXIT:
            break
        if question.strip() in _CLEAR:
            history.messages.clear()
            _say("(a new conversation)")
        elif words[0] == "/save":
            _save(history.messages, words[1] if len(words) > 1 else "")
        elif len(words) == 1 and words[0].startswith("/"):
            _say(f"{words[0]} is no command: {_HELP}")
        else:
            try:
                request = _request(args, lm, template, history, question, number)
            except UserError as error:
                _say(f"({error})")
                continue
            reply = _print_reply(lm.stream(request))
            history.messages += [Message("user", question), Message("assistant", reply)]
            number += 1
    return 0


def _read() -> str | None:
    """A line that the user has typed, empty where it is no text; None at the end of the input."""
    try:
        text = input(ASKING)
    except (EOFError, KeyboardInterrupt):
        print(flush=True)
        return None
    except UnicodeDecodeError as error:
        reason: str | None = f"is not {error.encoding.upper()}"
    else:
        # In some locales Python keeps bytes that it cannot decode.
        if (reason := why_invalid(text, encoding=sys.stdin.encoding or "utf-8")) is None:
            return text
    _say(f"(what was typed {reason}; type it again)")
    return ""


def _shared(read: Callable[[], str | None]) -> str | None:
    """What rank 0 has read, on all ranks. While the user thinks, the others are told to go on waiting: a collective
    that hears nothing for long fails.
    """
    from mindspeed_llm.platform import distributed

    if distributed.world_size() == 1:
        return read()
    import torch.distributed as dist

    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    if distributed.is_rank_zero():
        threading.Thread(target=lambda: lines.put(read()), daemon=True).start()
    while True:
        found: list[Any] = [False, None]
        if distributed.is_rank_zero():
            with contextlib.suppress(queue.Empty):
                found = [True, lines.get(timeout=WAITING_S)]
        dist.broadcast_object_list(found, src=0)
        if found[0]:
            return found[1]


def _request(
    args: Namespace, lm: CausalLM, template: PromptFormat | None, history: History, question: str, number: int
) -> Request:
    """What the model is asked: the question behind as many of the last turns as leave room for a reply.

    Raises:
        UserError: the question alone is too long.
    """
    for dropped in range(history.turns + 1):
        shown = history.shown(dropped)
        messages = [*shown, Message("user", question)]
        prompt: str | list[int]
        if template is None:
            prompt = "\n".join(message.content for message in messages)
        else:
            prompt = template.prompt_ids(Conversation(messages))
        try:
            return request_of(args, lm, prompt, _TASK, number=number, template=template)
        except UserError:
            if not shown:
                raise
    raise AssertionError("the last one shows no turn")


def _print_reply(answer: Iterable[Completion]) -> str:
    """Print a reply as it grows; returns its whole text, thoughts included."""
    from mindspeed_llm.platform import distributed

    text = printed = ""
    speaks = distributed.is_rank_zero()
    if speaks:
        print(REPLYING, end="", flush=True)
    try:
        for completion in answer:
            text = completion.text
            shown = without_tags(text, is_whole=completion.finish_reason is not None)
            if speaks and len(shown) > len(printed):
                print(shown[len(printed) :], end="", flush=True)
                printed = shown
    except KeyboardInterrupt:
        if distributed.world_size() > 1:
            raise
    if speaks:
        print("\n", flush=True)
    return text


def without_tags(text: str, *, is_whole: bool) -> str:
    """A reply without the tags around its thoughts. Of a reply that still grows, what may become a tag is left out, so
    that a longer reply begins with what a shorter one gives.
    """
    if not is_whole:
        for tag in _TAGS:
            for size in range(len(tag) - 1, 0, -1):
                if text.endswith(tag[:size]):
                    return without_tags(text[:-size], is_whole=True)
    for tag in _TAGS:
        text = text.replace(tag, "")
    return text.lstrip("\n")


def _save(messages: list[Message], name: str) -> None:
    from mindspeed_llm.platform import distributed

    if not distributed.is_rank_zero():
        return
    if not name:
        _say("/save needs the name of a file")
        return
    if not messages:
        _say(f"(nothing to save: the conversation is empty; {name} was not written)")
        return
    row = {"messages": [{"role": message.role, "content": message.content} for message in messages]}
    try:
        write_durably(
            Path(name).expanduser().absolute(), json.dumps(row, ensure_ascii=False) + "\n", through_links=True
        )
    except OSError as error:
        _say(f"{name} cannot be written: {error.strerror}")
    else:
        _say(f"({len(messages)} messages saved in {name})")


def _say(text: str) -> None:
    from mindspeed_llm.platform import distributed

    if distributed.is_rank_zero():
        print(text, file=sys.stdout, flush=True)
