"""What contradicts what on the command lines that ask a model."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.arguments.generation import TASKS
from mindspeed_llm.tasks.inference.bounds import check_beams
from mindspeed_llm.tasks.preprocess.templates import TEMPLATES_FILE, Template, load_template

# What clients say in their requests, or cannot ask for.
_OF_REQUESTS = (
    *("task", "max_new_tokens", "stop", "repetition_penalty", "temperature", "top_k", "top_p", "seed"),
    *("num_beams", "length_penalty", "history_turns"),
)


def settle_dtype(args: Namespace) -> None:
    """Let `dtype` and the switches of Megatron say the same.

    Raises:
        UserError: they contradict each other.
    """
    if args.bf16 and args.fp16:
        raise UserError("--bf16 and --fp16 contradict each other; leave one of them out")
    for name in ("bf16", "fp16"):
        if getattr(args, name):
            if args.dtype not in ("auto", name):
                raise UserError(f"--{name} and --dtype {args.dtype} contradict each other; leave one of them out")
            args.dtype = name
    args.bf16, args.fp16 = args.dtype == "bf16", args.dtype == "fp16"


def named_template(args: Namespace) -> Template:
    """The template that --prompt-type names. Raises UserError where there is none."""
    try:
        return load_template(args.prompt_type, Path(args.prompt_type_path or TEMPLATES_FILE))
    except UserError as error:
        text = str(error).replace("data.template:", "--prompt-type:")
        raise UserError(text.replace(", or null for the", ", or --hf-chat-template for the")) from error


def check_prompts(args: Namespace) -> None:
    """Check the flags about the form of prompts.

    Raises:
        UserError: two templates are named, there is none of that name, or something is said of a template and none is
            named.
    """
    if args.prompt_type is not None and args.hf_chat_template:
        raise UserError(
            f"--prompt-type {args.prompt_type} and --hf-chat-template both say in what form the model is asked; leave "
            "one of them out"
        )
    if args.prompt_type is not None:
        named_template(args)
    for name in ("prompt_type_path", "drop_thinking", "reasoning_effort"):
        if name in args.given and args.prompt_type is None:
            raise UserError(f"{_flag(name)} goes with --prompt-type, which is missing; add it or leave the flag out")
    if "enable_thinking" in args.given and args.prompt_type is None and not args.hf_chat_template:
        raise UserError(
            f"--enable-thinking {args.enable_thinking} is for a chat template; add --prompt-type or "
            "--hf-chat-template, or leave it out"
        )


def check_inference(args: Namespace) -> None:
    """Check what inference.py is asked to do; puts in `task`, the tasks in order, chat last.

    Raises:
        UserError: flags that contradict each other.
    """
    check_prompts(args)
    if args.serve:
        _check_serving(args)
        return
    for name in ("host", "port", "api_key"):
        if name in args.given:
            raise UserError(f"{_flag(name)} goes with --serve, which is missing; add it or leave the flag out")
    if args.prompt_file is not None:
        _check_file(args)
    elif args.output_file is not None:
        raise UserError(
            f"--output-file {args.output_file} takes the answers to --prompt-file, which is missing; add it"
        )
    if args.task is None:
        args.task = ("greedy",) if args.prompt_file is not None else TASKS[:-1]
    tasks = tuple(dict.fromkeys(args.task))
    args.task = tuple(sorted(tasks, key=lambda task: task == "chat"))
    if args.task == ("chat",) and args.prompt is not None:
        raise UserError("--prompt: in --task chat questions are typed; leave one of them out")
    args.notices += tuple(_idle(args))


def _check_serving(args: Namespace) -> None:
    for name in ("prompt", "prompt_file", "output_file"):
        if name in args.given:
            raise UserError(f"{_flag(name)} does not go with --serve, where clients ask; leave one of them out")
    if idle := [_flag(name) for name in _OF_REQUESTS if name in args.given]:
        args.notices += (f"no effect with --serve, where each request says it: {' '.join(idle)}",)


def _check_file(args: Namespace) -> None:
    if args.output_file is None:
        raise UserError(f"--prompt-file {args.prompt_file}: --output-file, where answers are written to, is missing")
    if args.prompt is not None:
        raise UserError("--prompt and --prompt-file both say what is asked; leave one of them out")
    if args.task is not None and (len(args.task) > 1 or "chat" in args.task):
        raise UserError(
            f"--prompt-file with --task {' '.join(args.task)}: a file of prompts is answered in one way, of "
            f"{', '.join(TASKS[:-1])}; name one"
        )


def _idle(args: Namespace) -> Iterator[str]:
    """A line for each flag that has no effect on these tasks."""
    samples = any(task in args.task for task in ("do_sample", "beam_search_with_sampling", "chat"))
    searches = any(task.startswith("beam_search") for task in args.task)
    for names, is_used, tasks in (
        (("temperature", "top_k", "top_p"), samples, "do_sample, beam_search_with_sampling or chat"),
        (("num_beams", "length_penalty"), searches, "beam_search or beam_search_with_sampling"),
        (("history_turns",), "chat" in args.task, "chat"),
        (("batch_size",), args.prompt_file is not None, ""),
    ):
        for name in names:
            if name in args.given and not is_used:
                yield f"{_flag(name)} has no effect without " + (f"--task {tasks}" if tasks else "--prompt-file")


def check_beams_of(args: Namespace, folder: Path) -> None:
    """Check --num-beams against the vocabulary of a model directory, as far as its config.json says it in the usual
    words; what ends answers is not known yet, and may make a search need more tokens.

    Raises:
        UserError: there are more beams than a search can follow.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    of_text = config.get("text_config")
    vocab_size = (of_text if isinstance(of_text, dict) else config).get("vocab_size")
    if args.serve or args.num_beams == 1 or not isinstance(vocab_size, int):
        return
    for task in args.task:
        if task.startswith("beam_search"):
            check_beams(args.num_beams, vocab_size, sample=task == "beam_search_with_sampling")


def _flag(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"
