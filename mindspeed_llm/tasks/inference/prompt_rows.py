"""The rows of a file of prompts and the place of their answers, checked before anything heavy. Needs no torch."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import why_uncreatable
from mindspeed_llm.tasks.preprocess.readers import Record, read_file
from mindspeed_llm.tasks.preprocess.records import Conversation, Message, UnusableRecord, to_prompt
from mindspeed_llm.tasks.preprocess.records.openai import COLUMNS
from mindspeed_llm.valid_text import invalid_part

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
    """The prompts of --prompt-file, all of them checked, and that --output-file can be written; a line about a file of
    that name comes to `args.notices`.

    Raises:
        UserError: a file cannot be read or written; a row (file and line are named) has no prompt, or one that is none.
    """
    file = Path(args.prompt_file)
    is_conversation = args.prompt_type is not None or args.hf_chat_template
    try:
        if not file.exists():
            raise UserError(f"--prompt-file {file} does not exist")
        if file.is_dir():
            raise UserError(f"--prompt-file {file} is a folder; expected a file with a line for each prompt")
        _check_output(args, file)
        rows = [_row(record, is_conversation=is_conversation) for record in read_file(file)]
    except OSError as error:
        raise UserError(f"--prompt-file {file} cannot be read: {error.strerror or error}; name another file") from error
    if not rows:
        raise UserError(f"--prompt-file {file} has no prompts; expected a line with an object for each")
    return rows


def _check_output(args: Namespace, file: Path) -> None:
    output = Path(args.output_file)
    try:
        if output.is_dir():
            raise UserError(f"--output-file {output} is a folder; expected the name of a file")
        exists = output.exists()
        if exists and not output.is_file():
            raise UserError(f"--output-file {output} is no regular file, and cannot be replaced by one; name another")
        if exists and output.samefile(file):
            raise UserError(f"--output-file {output} is --prompt-file, which would be lost; name another file")
        reason = why_uncreatable(output)
    except OSError as error:
        exists, reason = False, error.strerror or str(error)
    if reason is not None:
        raise UserError(f"--output-file {output} cannot be written: {reason}; name another place")
    if exists:
        args.notices += (f"--output-file {output} exists, and is replaced when all answers are there",)


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
    _check_text(record, "prompt")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{record.where}: prompt is {json.dumps(text)[:60]}; expected a text that is not empty")
    prompt = Conversation([Message("user", text)]) if is_conversation else text
    return Row(where=record.where, prompt=prompt, text=text)


def _conversation(record: Record) -> Conversation:
    """A reply at the end is what the data answer, and left out."""
    for column in filter(None, COLUMNS.values()):
        _check_text(record, column)
    try:
        return to_prompt(record, "openai", COLUMNS, {}, answer_required=False).prompt
    except UnusableRecord as error:
        raise UserError(f"{record.where}: messages: {error}") from error


def _check_text(record: Record, field: str) -> None:
    if reason := invalid_part(record.data.get(field), field):
        raise UserError(f"{record.where}: {reason}; expected valid text, repair it or remove the line")
