"""A file of prompts in, a file of answers out: shared among the copies of the model, in the order of the prompts."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import write_durably
from mindspeed_llm.tasks.inference.answering import answer
from mindspeed_llm.tasks.inference.causal_lm import CausalLM, check_room
from mindspeed_llm.tasks.inference.generation import Completion, Request
from mindspeed_llm.tasks.inference.progress import Progress
from mindspeed_llm.tasks.inference.prompt_format import PromptFormat, prompt_format
from mindspeed_llm.tasks.inference.prompt_rows import Row
from mindspeed_llm.tasks.inference.settings import answer_limit, request_of, tell_of_positions
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer
from mindspeed_llm.termination import tells_when_ended


def check_lengths(args: Namespace, rows: Sequence[Row], tokenizer: Tokenizer, positions: int) -> None:
    """Find out before the model is loaded whether it has room for the answers.

    Raises:
        UserError: a prompt leaves none; names file and line.
    """
    template = prompt_format(args, tokenizer)
    for row in rows:
        with _naming(row):
            prompt = _prompt(row, template)
            length = len(tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt)
            check_room(length, positions)
            answer_limit(args, length, positions)


def answer_file(args: Namespace, lm: CausalLM, rows: Sequence[Row], template: PromptFormat | None) -> None:
    """Answer all rows and write --output-file, when the last one is there (a collective).

    Raises:
        UserError: a prompt leaves no room for an answer; names file and line.
    """
    [task] = args.task
    requests = [_request(args, lm, row, task, number, template) for number, row in enumerate(rows)]
    tell_of_positions(args, lm, [len(request.prompt) for request in requests])
    backend = lm.backend
    # The longest are dealt out first, so that copies have about the same to do.
    order = sorted(range(len(requests)), key=lambda number: -len(requests[number].prompt))
    mine = order[backend.replica :: backend.replicas]
    progress = Progress("answers", len(mine), show=backend.replica == 0 and backend.is_first_of_replica)

    def on_done(place: int, completion: Completion) -> None:
        progress.add(len(completion.token_ids))

    with _telling_of_an_early_end(progress, args.output_file):
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
    _write(Path(args.output_file), "\n".join(lines) + "\n")


def _write(output: Path, text: str) -> None:
    """Write the answers; where that fails, the work of hours is kept in another place."""
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_durably(output.absolute(), text, through_links=True)
    except OSError as error:
        reason = f"--output-file {output} cannot be written: {error.strerror or error}"
        try:
            kept = Path(tempfile.mkdtemp(prefix="answers-")) / output.name
            write_durably(kept, text)
        except OSError as other:
            raise UserError(
                f"{reason}. The answers are lost, as no temporary file can be written either "
                f"({other.strerror or other}); make room, and run it again"
            ) from error
        raise UserError(f"{reason}. All answers are there: they are in {kept}; move that file where you want it") from (
            error
        )


def _telling_of_an_early_end(progress: Progress, output: str) -> AbstractContextManager[None]:
    """Ctrl-C and SIGTERM end the run as ever, but rank 0 says what that means for the answers."""
    from mindspeed_llm.platform import distributed

    ranks = distributed.world_size()

    def tell() -> str:
        if not distributed.is_rank_zero():
            return ""
        whose = "answers" if ranks == 1 else f"answers of rank 0 (of {ranks})"
        return f"ended early: {progress.done} of {progress.total} {whose} were ready; {output} was not written"

    return tells_when_ended(tell)


def _prompt(row: Row, template: PromptFormat | None) -> str | list[int]:
    if isinstance(row.prompt, str):
        return row.prompt
    assert template is not None, "conversations are read where there is a template"
    return template.prompt_ids(row.prompt)


@contextmanager
def _naming(row: Row) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error


def _request(args: Namespace, lm: CausalLM, row: Row, task: str, number: int, template: PromptFormat | None) -> Request:
    with _naming(row):
        return request_of(args, lm, _prompt(row, template), task, number=number, template=template)


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
