"""A file of prompts in, a file of answers out: shared among the copies of the model, in the order of the prompts."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import why_unwritable, write_durably
from mindspeed_llm.tasks.inference.answering import answer
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.generation import Completion, Request
from mindspeed_llm.tasks.inference.progress import Progress
from mindspeed_llm.tasks.inference.prompt_format import PromptFormat
from mindspeed_llm.tasks.inference.settings import request_of
from mindspeed_llm.tasks.preprocess.readers import Record, read_file
from mindspeed_llm.tasks.preprocess.records import Conversation, Message, UnusableRecord, to_prompt
from mindspeed_llm.tasks.preprocess.records.openai import COLUMNS

_FIELDS = ("prompt", "messages")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt of the file."""

    where: str
    """File and line."""
    prompt: str | Conversation
    text: str | None
    """The field prompt, where the row has it."""


def read_prompts(args: Namespace) -> list[Row]:
    """The prompts of --prompt-file, all of them checked, and that --output-file can be written.

    Raises:
        UserError: a file cannot be read or written; a row (file and line are named) has no prompt, or one that is none.
    """
    file, output = Path(args.prompt_file), Path(args.output_file)
    if not file.exists():
        raise UserError(f"--prompt-file {file} does not exist")
    if output.is_dir():
        raise UserError(f"--output-file {output} is a folder; expected the name of a file")
    if output.absolute() == file.absolute():
        raise UserError(f"--output-file {output} is --prompt-file, which would be lost; name another file")
    if reason := why_unwritable(output.absolute().parent):
        raise UserError(f"--output-file {output} cannot be written: {reason}; name another place")
    is_conversation = args.prompt_type is not None or args.hf_chat_template
    rows = [_row(record, is_conversation=is_conversation) for record in read_file(file)]
    if not rows:
        raise UserError(f"--prompt-file {file} has no prompts; expected a line with an object for each")
    return rows


def _row(record: Record, *, is_conversation: bool) -> Row:
    found = [name for name in _FIELDS if record.data.get(name) is not None]
    if len(found) != 1:
        there = ", ".join(found or record.data) or "none"
        raise UserError(f"{record.where}: expected one of the fields prompt and messages, found {there}")
    if found == ["messages"]:
        if not is_conversation:
            raise UserError(
                f"{record.where}: messages are written in a chat template, and none is named; add --prompt-type or "
                "--hf-chat-template"
            )
        return Row(where=record.where, prompt=_conversation(record), text=None)
    text = record.data["prompt"]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{record.where}: prompt is {json.dumps(text)[:60]}; expected a text that is not empty")
    prompt = Conversation([Message("user", text)]) if is_conversation else text
    return Row(where=record.where, prompt=prompt, text=text)


def _conversation(record: Record) -> Conversation:
    """A reply at the end is what the data answer, and left out."""
    try:
        return to_prompt(record, "openai", COLUMNS, {}, answer_required=False).prompt
    except UnusableRecord as error:
        raise UserError(f"{record.where}: messages: {error}") from error


def answer_file(args: Namespace, lm: CausalLM, rows: Sequence[Row], template: PromptFormat | None) -> None:
    """Answer all rows and write --output-file, when the last one is there (a collective).

    Raises:
        UserError: a prompt leaves no room for an answer; names file and line.
    """
    [task] = args.task
    requests = [_request(args, lm, row, task, number, template) for number, row in enumerate(rows)]
    backend = lm.backend
    # The longest are dealt out first, so that copies have about the same to do.
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].prompt))
    mine = order[backend.replica :: backend.replicas]
    progress = Progress("answers", len(mine), show=backend.replica == 0 and backend.is_first_of_replica)

    def on_done(place: int, completion: Completion) -> None:
        progress.add(len(completion.token_ids))

    try:
        answers = answer(args, lm, [requests[number] for number in mine], task, on_done=on_done)
    finally:
        progress.close()
    found = dict(zip(mine, answers, strict=True))
    everything = _gathered(found if backend.is_first_of_replica else {}, backend.replicas)
    if everything is None:
        return
    assert sorted(everything) == list(range(len(rows))), "each prompt is answered once"
    lines = [
        json.dumps(_line(lm, row, requests[number], everything[number]), ensure_ascii=False)
        for number, row in enumerate(rows)
    ]
    output = Path(args.output_file)
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_durably(output.absolute(), "\n".join(lines) + "\n")


def _request(args: Namespace, lm: CausalLM, row: Row, task: str, number: int, template: PromptFormat | None) -> Request:
    try:
        prompt: str | list[int]
        if isinstance(row.prompt, str):
            prompt = row.prompt
        else:
            assert template is not None, "conversations are read where there is a template"
            prompt = template.prompt_ids(row.prompt)
        return request_of(args, lm, prompt, task, number=number, template=template)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error


def _line(lm: CausalLM, row: Row, request: Request, completion: Completion) -> dict[str, Any]:
    return {
        "prompt": lm.tokenizer.decode(request.prompt) if row.text is None else row.text,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "finish_reason": completion.finish_reason,
    }


def _gathered(found: dict[int, Completion], replicas: int) -> dict[int, Completion] | None:
    """The answers of all copies on rank 0, and None on others."""
    from mindspeed_llm.platform import distributed

    if distributed.world_size() == 1:
        return found
    import torch.distributed as dist

    distributed.wait_for_all()
    parts: list[dict[int, Completion]] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(found, parts)
    return None if parts is None else {number: item for part in parts for number, item in part.items()}
