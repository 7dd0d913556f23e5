"""The command `inference.py`: from flags to answers."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_llm.tasks.inference.arguments.checks import check_beams_of
from mindspeed_llm.tasks.inference.arguments.inference import inference_arguments
from mindspeed_llm.tasks.inference.source import find_source, world_size_of

if TYPE_CHECKING:
    from mindspeed_llm.tasks.inference.causal_lm import CausalLM
    from mindspeed_llm.tasks.inference.prompt_format import PromptFormat
    from mindspeed_llm.tasks.inference.prompt_rows import Row
    from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer

DEMO_PROMPT = "how are you?"
_WIDTH = 46


def main(argv: list[str]) -> int:
    """Do what `argv` says; returns the exit code.

    What users can get wrong is checked before a model is loaded: flags, folders, the rows of a file of prompts.

    Raises:
        UserError: a mistake in the flags, the files, or the model.
        SystemExit: `--help`.
    """
    args = inference_arguments(argv)
    if args.serve:
        from mindspeed_llm.tasks.inference.serve.check import check_serve

        check_serve(args)
    rows: list[Row] = []
    if args.prompt_file is not None:
        from mindspeed_llm.tasks.inference.prompt_rows import read_prompts

        rows = read_prompts(args)
    world_size = world_size_of(args)
    source = find_source(args, world_size)
    if source.kind == "hf" and source.path.is_dir():
        from mindspeed_llm.tasks.inference.adapters.hf_files import check_directory
        from mindspeed_llm.tasks.inference.tokenizer import names_tokenizer

        check_directory(source.path, has_other_tokenizer=names_tokenizer(args))
        check_beams_of(args, source.path)
    if source.backend == "megatron":
        from mindspeed_llm.tasks.inference.megatron_model import check

        check(args, world_size)
    from mindspeed_llm.observability.log import get_logger, setup_logging

    setup_logging()
    if _is_rank_zero():
        for notice in args.notices:
            get_logger(__name__).warning(notice)
    tokenizer = None
    if rows and source.kind == source.backend == "hf" and source.path.is_dir():
        tokenizer = _check_lengths(args, source.path, rows)
    if args.check is not None:
        from mindspeed_llm.tasks.inference.plan import plan_text

        text = plan_text(args, source, world_size)
        if _is_rank_zero():
            print(text, flush=True)
        return 0
    import torch.distributed as dist

    from mindspeed_llm.tasks.inference.load import load_causal_lm

    joined_before = dist.is_initialized()
    lm = load_causal_lm(args, source, tokenizer)
    if args.serve:
        from mindspeed_llm.tasks.inference.serve.main import serve

        code = serve(lm, args)
    else:
        code = _answer(args, lm, rows)
    # Not after an error: ranks agree through the job on who tells it.
    _close(lm, leave=not joined_before)
    return code


def _check_lengths(args: Namespace, folder: Path, rows: Sequence[Row]) -> Tokenizer | None:
    """Returns the tokenizer that it took."""
    from mindspeed_llm.tasks.inference.adapters.hf_files import positions_of

    if (positions := positions_of(folder)) is None:
        return None
    from mindspeed_llm.tasks.inference.prompt_file import check_lengths
    from mindspeed_llm.tasks.inference.tokenizer import named_tokenizer

    tokenizer = named_tokenizer(args, str(folder))
    assert tokenizer is not None, "a folder is named"
    check_lengths(args, rows, tokenizer, positions)
    return tokenizer


def _answer(args: Namespace, lm: CausalLM, rows: Sequence[Row]) -> int:
    from mindspeed_llm.tasks.inference.prompt_format import prompt_format

    template = prompt_format(args, lm.tokenizer)
    if args.prompt_file is not None:
        from mindspeed_llm.tasks.inference.prompt_file import answer_file

        answer_file(args, lm, rows, template)
        return 0
    for number, task in enumerate(args.task):
        if task == "chat":
            from mindspeed_llm.tasks.inference.chat import chat

            return chat(args, lm)
        _answer_prompts(args, lm, task, args.prompt or (DEMO_PROMPT,), template, tell=number == 0)
    return 0


def _answer_prompts(
    args: Namespace, lm: CausalLM, task: str, prompts: Sequence[str], template: PromptFormat | None, *, tell: bool
) -> None:
    """Print what the model answers to texts, under a headline; `tell`: and whether it has positions for all of that."""
    from mindspeed_llm.tasks.inference.answering import TITLES, answer
    from mindspeed_llm.tasks.inference.settings import request_of, tell_of_positions

    requests = [
        request_of(
            args, lm, prompt if template is None else template.question_ids(prompt), task, number=n, template=template
        )
        for n, prompt in enumerate(prompts)
    ]
    if tell:
        tell_of_positions(args, lm, [len(request.prompt) for request in requests])
    start = time.perf_counter()
    answers = answer(args, lm, requests, task)
    elapsed = time.perf_counter() - start
    if not _is_rank_zero():
        return
    lines = [f" {TITLES[task]} ".center(_WIDTH, "=")]
    for prompt, found in zip(prompts, answers, strict=True):
        lines += [f"You:\n{prompt}\n", f"MindSpeed-LLM:\n{found.text}", "-" * _WIDTH]
    lines[-1] = "=" * _WIDTH
    print("\n".join([*lines, f"Elapsed: {elapsed:.2f}s", ""]), flush=True)


def _close(lm: CausalLM, *, leave: bool) -> None:
    """Let go of what was set up for the model, and leave the job that was joined for it."""
    from mindspeed_llm.platform import distributed

    close = getattr(lm.backend, "close", None)
    if close is not None:
        close()
    if leave:
        distributed.destroy_process_group()


def _is_rank_zero() -> bool:
    return os.environ.get("RANK", "0") == "0"
