"""Any task of lm-eval on any checkpoint: the models of this package as lm-eval's models.

    python -m mindspeed_llm.tasks.evaluation.lm_eval_adapter --load CHECKPOINT --tasks hellaswag --limit 100
    torchrun --nproc_per_node 8 -m mindspeed_llm.tasks.evaluation.lm_eval_adapter --load CHECKPOINT --tasks mmlu

lm-eval (extra `eval`) is imported when the command runs, not before.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_llm import cli
from mindspeed_llm.errors import UserError
from mindspeed_llm.files import why_unwritable
from mindspeed_llm.flag import Group, count, positive, several, switch, value
from mindspeed_llm.observability.log import get_logger, setup_logging
from mindspeed_llm.tasks.evaluation.model import THOUGHTS_END
from mindspeed_llm.tasks.inference.arguments.checks import check_prompts
from mindspeed_llm.tasks.inference.arguments.command import Command, parse
from mindspeed_llm.tasks.inference.source import find_source, world_size_of

if TYPE_CHECKING:
    from mindspeed_llm.tasks.evaluation.ranks import Ranks
    from mindspeed_llm.tasks.inference.causal_lm import CausalLM
    from mindspeed_llm.tasks.inference.generation import Request

_LOG = get_logger("evaluation")
_HERE = "tasks.evaluation.lm_eval_adapter"
_BLOCK = 256
"""Requests that are worked on in one call: as many on any number of copies of the model, so that numbers do not depend
on it.
"""
_MAX_NEW_TOKENS = 256
"""lm-eval's own number where a task names none."""

COMMAND = Command(
    program="python -m mindspeed_llm.tasks.evaluation.lm_eval_adapter",
    description="Run tasks of lm-eval on a checkpoint.",
    groups=(
        Group(
            title="lm-eval",
            flags=(
                several("--tasks", str, None, "tasks, groups or tags of lm-eval.", _HERE, metavar="NAME"),
                value("--include-path", str, None, "folder with further task files.", _HERE, metavar="DIR"),
                value("--limit", positive, None, "samples of each task, at most; by default all.", _HERE),
                value("--num-fewshot", count, None, "examples in a prompt; by default as the task says.", _HERE),
                value("--batch-size", positive, 8, "texts that are generated at once.", _HERE),
                value("--system-instruction", str, None, "what stands before every prompt.", _HERE, metavar="TEXT"),
                switch("--confirm-run-unsafe-code", "run tasks that execute what the model writes.", _HERE),
                value(
                    "--output-dir",
                    str,
                    None,
                    "folder for results.json and samples_<task>.jsonl; by default nothing is written.",
                    _HERE,
                    metavar="DIR",
                ),
            ),
        ),
    ),
    refused={
        "--apply-chat-template": "--hf-chat-template does that here",
        "--model": "--load names the model",
        "--model-args": "--load names the model, and flags say how it is loaded",
    },
)


def main(argv: list[str]) -> int:
    """Run the tasks that `argv` names and print lm-eval's tables; returns the exit code.

    Raises:
        UserError: a mistake in the flags, an unknown task, or lm-eval is not installed.
        SystemExit: `--help`.
    """
    args = _arguments(argv)
    _check_lm_eval()
    world_size = world_size_of(args)
    source = find_source(args, world_size)
    if source.backend == "megatron":
        from mindspeed_llm.tasks.inference.megatron_model import check

        check(args, world_size)
    setup_logging()
    for notice in args.notices:
        _LOG.info("%s", notice)
    manager = _task_manager(args.tasks, args.include_path)
    if args.check is not None:
        from mindspeed_llm.tasks.inference.plan import plan_text

        print(plan_text(args, source, world_size), flush=True)
        return 0
    import lm_eval
    import torch.distributed as dist

    from mindspeed_llm.platform import distributed
    from mindspeed_llm.tasks.evaluation.ranks import Ranks
    from mindspeed_llm.tasks.inference.load import load_causal_lm
    from mindspeed_llm.tasks.inference.prompt_format import THINKING

    joined_before = dist.is_initialized()
    lm = load_causal_lm(args, source)
    ranks = Ranks()
    found = lm_eval.simple_evaluate(
        model=lm_eval_model(
            lm, name=args.load, ranks=ranks, seed=args.seed, enable_thinking=THINKING[args.enable_thinking]
        ),
        tasks=list(args.tasks),
        task_manager=manager,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        apply_chat_template=args.hf_chat_template,
        system_instruction=args.system_instruction,
        confirm_run_unsafe_code=args.confirm_run_unsafe_code,
    )
    if ranks.rank == 0:
        _publish(found, None if args.output_dir is None else Path(args.output_dir))
    # Not after an error: ranks agree through the job on who tells it.
    if (close := getattr(lm.backend, "close", None)) is not None:
        close()
    if not joined_before:
        distributed.destroy_process_group()
    return 0


def _arguments(argv: Sequence[str]) -> Namespace:
    # lm-eval spells its own flags with underscores.
    own = {flag.name for group in COMMAND.groups for flag in group.flags} | set(COMMAND.refused)
    spelt = [word.replace("_", "-") if word.replace("_", "-") in own else word for word in argv]
    args = parse(spelt, COMMAND)
    check_prompts(args)
    if not args.tasks:
        raise UserError("--tasks is missing: name one or more tasks of lm-eval, such as --tasks hellaswag arc_easy")
    if args.prompt_type is not None:
        raise UserError(
            f"--prompt-type {args.prompt_type}: lm-eval makes conversations with the tokenizer's own template; give "
            "--hf-chat-template instead"
        )
    if args.include_path is not None and not Path(args.include_path).is_dir():
        raise UserError(f"--include-path {args.include_path} is no folder; expected one with task files")
    if args.output_dir is not None and (reason := why_unwritable(Path(args.output_dir))):
        raise UserError(f"--output-dir {args.output_dir} cannot be written: {reason}")
    return args


def _check_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-eval is not installed; install the extra that brings it: pip install mindspeed_llm[eval]")


def _task_manager(tasks: Sequence[str], include_path: str | None) -> Any:
    """What knows the tasks. lm-eval's own, which are many files, are read only where they are asked for."""
    from lm_eval.tasks import TaskManager

    unknown: Sequence[str] = tasks
    for has_defaults in (False, True) if include_path is not None else (True,):
        manager = TaskManager(include_path=include_path, include_defaults=has_defaults)
        unknown = [name for name in tasks if name not in manager.all_tasks]
        if not unknown:
            return manager
    raise UserError(
        f"--tasks names {', '.join(unknown)}, which lm-eval does not have; `lm-eval ls tasks` lists its tasks, and "
        "--include-path adds a folder with others"
    )


def lm_eval_model(
    lm: CausalLM, *, name: str, ranks: Ranks | None = None, seed: int = 0, enable_thinking: bool | None = None
) -> Any:
    """An `lm_eval.api.model.TemplateLM` that asks `lm` (a collective: all ranks ask for the same, and get all answers).

    Args:
        lm: the model.
        name: what lm-eval calls it and its tokenizer.
        ranks: None: of this job.
        seed: of the first request that draws tokens; each has its own.
        enable_thinking: what chat templates are told of that name; None: nothing. With True, thoughts are taken out of
            texts, as lm-eval's own models do with it.

    Raises:
        UserError: lm-eval is not installed.
    """
    _check_lm_eval()
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    from mindspeed_llm.tasks.evaluation.ranks import Ranks
    from mindspeed_llm.tasks.inference.likelihood import pair_likelihoods
    from mindspeed_llm.tasks.inference.pairs import Pair, encode_pairs, encode_texts, prefix_token_id

    ranks = ranks or Ranks()
    tokenizer = lm.tokenizer
    variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    class Model(TemplateLM):
        """lm-eval shares out nothing itself (its world size stays 1): the copies of the model do that here."""

        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tokenizer

        @property
        def eot_token_id(self) -> int:
            return prefix_token_id(tokenizer) if tokenizer.eos_token_id is None else tokenizer.eos_token_id

        @property
        def prefix_token_id(self) -> int:
            return prefix_token_id(tokenizer)

        @property
        def max_length(self) -> int:
            return lm.max_length

        @property
        def tokenizer_name(self) -> str:
            return name.replace("/", "__")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            if add_special_tokens is None:
                return encode_texts(tokenizer, [string])[string]
            return tokenizer.encode(string, add_special_tokens=add_special_tokens)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **variables,
            )

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            asked = [request.args for request in requests]
            pairs = encode_pairs(tokenizer, [context for context, _ in asked], [text for _, text in asked])
            found = self._likelihoods(pairs)
            for arguments, answer in zip(asked, found, strict=True):
                self.cache_hook.add_partial("loglikelihood", arguments, answer)
            return found

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return self._likelihoods(
                [Pair(context=tuple(before), continuation=tuple(behind)) for _, before, behind in requests]
            )

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            windows, owners = [], []
            for owner, request in enumerate(requests):
                (text,) = request.args
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                ):
                    windows.append((None, *make_disjoint_window(window)))
                    owners.append(owner)
            sums = [0.0] * len(requests)
            for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
                sums[owner] += logprob
            for request, total in zip(requests, sums, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return sums

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            texts = encode_texts(tokenizer, [context for context, _ in (request.args for request in requests)])
            asked = []
            for number, request in enumerate(requests):
                context, options = request.args
                options = normalize_gen_kwargs(options, _MAX_NEW_TOKENS)
                asked.append(_generation_request(lm, texts[context], options, seed + number))
            found = _shared_out(asked, lambda part: [answer.text for answer in lm.generate(part)], lm, ranks)
            if enable_thinking:
                found = [text.rpartition(THOUGHTS_END)[2].lstrip() for text in found]
            for request, text in zip(requests, found, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, text)
            return found

        def _likelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
            def work(part: Sequence[Pair]) -> list[tuple[float, bool]]:
                return [(found.logprob, found.is_greedy) for found in pair_likelihoods(lm.backend, part)]

            return _shared_out(pairs, work, lm, ranks)

    return Model()


def _generation_request(lm: CausalLM, ids: Sequence[int], options: Mapping[str, Any], seed: int) -> Request:
    """What a task's `generation_kwargs` ask for; a long prompt loses its beginning, as in lm-eval."""
    from mindspeed_llm.tasks.inference.generation import Sampling
    from mindspeed_llm.tasks.inference.sampling import check

    options = dict(options)
    until, new_tokens = options.pop("until", []), options.pop("max_gen_toks")
    do_sample, temperature = options.pop("do_sample"), options.pop("temperature", 1.0)
    sampling = Sampling(
        do_sample=do_sample,
        # Without drawing lm-eval says 0.
        temperature=temperature if do_sample else 1.0,
        top_k=options.pop("top_k", 0),
        top_p=options.pop("top_p", 1.0),
        repetition_penalty=options.pop("repetition_penalty", 1.0),
        seed=seed,
    )
    if options:
        raise UserError(
            f"the task generates with {', '.join(f'{key}={value!r}' for key, value in options.items())}, which is not "
            "known here; take it out of the generation_kwargs of its task file"
        )
    try:
        check(sampling)
    except UserError as error:
        raise UserError(f"the generation_kwargs of the task: {error}") from error
    room = lm.max_length - new_tokens
    if room < 1:
        raise UserError(
            f"the task asks for answers of {new_tokens} tokens, and the model has {lm.max_length} positions: no room "
            "is left for a prompt; lower max_gen_toks in its task file"
        )
    return lm.request(
        ids[-room:],
        max_new_tokens=new_tokens,
        stop=[until] if isinstance(until, str) else until,
        sampling=sampling,
    )


def _shared_out(items: Sequence[Any], work: Callable[[Sequence[Any]], list], lm: CausalLM, ranks: Ranks) -> list:
    """The results of `work`, which takes a part of the items, over all copies of the model; on every rank, in order."""
    blocks = [items[start : start + _BLOCK] for start in range(0, len(items), _BLOCK)]
    own = {place: work(blocks[place]) for place in range(lm.backend.replica, len(blocks), lm.backend.replicas)}
    found: dict[int, list] = {}
    for part in ranks.gather_everywhere(own):
        found.update(part)
    return [result for place in range(len(blocks)) for result in found[place]]


def _publish(found: Mapping[str, Any], folder: Path | None) -> None:
    """Print the tables, and write what lm-eval has found."""
    from lm_eval.utils import handle_non_serializable, make_table

    print(make_table(found), flush=True)
    if found.get("groups"):
        print(make_table(found, "groups"), flush=True)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)

    def text(content: Any, **options: Any) -> str:
        return json.dumps(content, default=handle_non_serializable, ensure_ascii=False, **options) + "\n"

    for name, samples in found["samples"].items():
        (folder / f"samples_{name}.jsonl").write_text("".join(map(text, samples)), encoding="utf-8")
    rest = {key: content for key, content in found.items() if key != "samples"}
    (folder / "results.json").write_text(text(rest, indent=2), encoding="utf-8")


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
