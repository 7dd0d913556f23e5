"""From flags to benchmarks: which are asked, in which of their forms, and what does not go together."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import Benchmark, Variant, Write
from mindspeed_llm.tasks.evaluation.registry import find

_VARIANTS: tuple[tuple[str, Variant], ...] = (
    ("chain_of_thought", "chain-of-thought"),
    ("alternative_prompt", "alternative-prompt"),
)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A benchmark in the form that the flags ask for, and where its data are."""

    benchmark: Benchmark
    path: Path
    variant: Variant | None = None
    num_fewshot: int = 0
    notices: tuple[str, ...] = ()
    """A line for each flag that does nothing for this benchmark."""


def choose_all(args: Namespace) -> tuple[Chosen, ...]:
    """The benchmarks of --task with their paths of --task-data-path.

    Raises:
        UserError: no task, an unknown one, one that is named twice, another number of paths, or a flag that a benchmark
            has no use for.
    """
    names, paths = args.task or (), args.task_data_path or ()
    if not names:
        raise UserError("--task is missing: name one or more benchmarks, such as --task mmlu gsm8k")
    found = [find(name) for name in names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--task names {', '.join(twice)} more than once; name each benchmark once")
    if len(paths) != len(names):
        raise UserError(
            f"--task names {len(names)} benchmark{'s' * (len(names) > 1)} ({', '.join(names)}), --task-data-path "
            f"{len(paths)} path{'s' * (len(paths) != 1)}; give one path for each benchmark, in the same order (no "
            "path counts for several)"
        )
    return tuple(_choose(benchmark, Path(path), args) for benchmark, path in zip(found, paths, strict=True))


def _choose(benchmark: Benchmark, path: Path, args: Namespace) -> Chosen:
    benchmark = _in_language(benchmark, args.eval_language)
    asked = [(flag, variant) for flag, variant in _VARIANTS if getattr(args, flag)]
    if len(asked) > 1:
        raise UserError("--chain-of-thought and --alternative-prompt are two forms of a question; give one of them")
    variant = asked[0][1] if asked else None
    if variant is not None:
        if variant not in benchmark.variants:
            raise _useless(benchmark, f"--{variant}", "it has no such form")
        benchmark = benchmark.variants[variant]
    is_conversation = (args.prompt_type is not None or args.hf_chat_template) and not args.no_chat_template
    notices = list(_notices(benchmark, args))
    if variant is None and args.instruction_template is None and benchmark.continues_text and is_conversation:
        variant = "alternative-prompt"
        benchmark = benchmark.variants[variant]
        notices.append(f"{benchmark.name} is asked as with --alternative-prompt: no reply goes on with a prompt's text")
    if args.instruction_template is not None:
        if benchmark.with_instruction is None:
            raise _useless(benchmark, "--instruction-template", "its prompts have no place for one")
        benchmark = benchmark.with_instruction(args.instruction_template)
    if args.origin_postprocess:
        if benchmark.original_metric is None:
            raise _useless(benchmark, "--origin-postprocess", "its headline is the original scorer's already")
        benchmark = replace(benchmark, headline=benchmark.original_metric)
    if benchmark.executes_code and not args.allow_code_execution:
        raise UserError(
            f"--task {benchmark.name} runs programs that the model has written, in a process without network that can "
            "read files but change none; add --allow-code-execution if you want that"
        )
    num_fewshot = benchmark.num_fewshot if args.num_fewshot is None else args.num_fewshot
    if num_fewshot and not benchmark.has_examples:
        raise _useless(benchmark, f"--num-fewshot {num_fewshot}", "its files bring no examples for prompts")
    if args.max_new_tokens is not None and isinstance(benchmark.answer, Write):
        benchmark = replace(benchmark, answer=replace(benchmark.answer, max_new_tokens=args.max_new_tokens))
    return Chosen(
        benchmark=benchmark,
        path=path,
        variant=variant,
        num_fewshot=num_fewshot,
        notices=tuple(notices),
    )


def _in_language(benchmark: Benchmark, language: str | None) -> Benchmark:
    if language in (None, benchmark.language):
        return benchmark
    if language not in benchmark.in_language:
        reason = "its subjects have languages of their own" if benchmark.language is None else "it has no such prompts"
        raise _useless(benchmark, f"--eval-language {language}", reason)
    return benchmark.in_language[language]


def _useless(benchmark: Benchmark, flag: str, reason: str) -> UserError:
    return UserError(f"{flag} does not go with --task {benchmark.name}: {reason}; leave it out or run the task alone")


def _notices(benchmark: Benchmark, args: Namespace) -> Iterator[str]:
    if args.max_new_tokens is not None and not isinstance(benchmark.answer, Write):
        yield f"--max-new-tokens has no effect on {benchmark.name}: it compares likelihoods and writes nothing"
    if args.allow_code_execution and not benchmark.executes_code:
        yield f"--allow-code-execution has no effect on {benchmark.name}: it runs no programs"
