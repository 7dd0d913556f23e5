"""evaluation.py: from the command line to scores, samples and a report."""

from __future__ import annotations

import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import why_uncreatable, why_unwritable
from mindspeed_llm.locks import FileLock, LockIsHeld
from mindspeed_llm.observability.log import get_logger, setup_logging
from mindspeed_llm.tasks.evaluation.arguments import evaluation_arguments
from mindspeed_llm.tasks.evaluation.benchmark import Write
from mindspeed_llm.tasks.evaluation.choosing import Chosen, choose_all
from mindspeed_llm.tasks.evaluation.earlier import differences, read_earlier
from mindspeed_llm.tasks.evaluation.model import check_room
from mindspeed_llm.tasks.evaluation.results import RESULTS, check_same, decisive, writing

if TYPE_CHECKING:
    from mindspeed_llm.tasks.evaluation.ranks import Ranks
    from mindspeed_llm.tasks.evaluation.run import LoadedModel
    from mindspeed_llm.tasks.evaluation.tasks import Task

_LOG = get_logger("evaluation")
_DEFAULT_FOLDER = Path("output/evaluation")
_LOCK = ".evaluation.lock"
# Flags that say where results go, not what they are.
_NOT_DECISIVE = ("output_dir", "compare", "debug", "allow_code_execution")
_NOT_VERSIONS = ("system", "device")

Load = Callable[[Namespace], "LoadedModel"]


def main(argv: list[str], load: Load | None = None) -> int:
    """Evaluate as `argv` says. Flags, data and the kind of the model are checked before a model is loaded.

    Args:
        load: gives the model that the flags name; None: `load_model`.

    Returns:
        The exit code.

    Raises:
        UserError: a mistake in the flags, the data, or the model.
        SystemExit: `--help`.
    """
    args = evaluation_arguments(argv)
    setup_logging()
    for notice in args.notices:
        _LOG.info("%s", notice)
    told = len(args.notices)
    place = Path(args.output_dir) if args.output_dir is not None else _DEFAULT_FOLDER
    # One rank tries: those of several machines could take each other's trial away.
    reason = why_uncreatable(place / RESULTS) if os.environ.get("RANK", "0") == "0" else why_unwritable(place)
    if reason is not None:
        raise UserError(f"--output-dir {place} cannot be written: {reason}")
    chosen = choose_all(args)
    compare = None if args.compare is None else read_earlier(args.compare, [one.benchmark.name for one in chosen])
    plan = None if load is not None else _checked_source(args, chosen)
    tasks = load_tasks(args, chosen)
    if args.output_dir is not None and all(task.items for task in tasks):
        check_same(place, tasks={task.name: task.decisive() for task in tasks})
    for notice in args.notices[told:]:
        _LOG.info("%s", notice)
    for difference in differences(compare, {task.name: task.described() for task in tasks}) if compare else ():
        _warn("%s", difference)
    if args.check is not None:
        _print_plan(plan, tasks)
        return 0
    import torch.distributed as dist

    from mindspeed_llm.tasks.evaluation.ranks import Ranks
    from mindspeed_llm.tasks.evaluation.tasks import fitted

    joined_before = dist.is_initialized()
    model = (load or load_model)(args)
    tasks = [fitted(task, model.encode, model.max_length) for task in tasks]
    asked = {task.name: task.decisive() for task in tasks}
    about_model = {"description": model.description, "fingerprint": model.fingerprint, **model.decisive}
    folder = place if args.output_dir is not None else place / _name(asked, decisive(about_model))
    ranks = Ranks()
    lock = FileLock(folder / _LOCK, without_locks="do not let two evaluations write to one folder")
    try:
        if ranks.rank == 0:
            _take(folder, lock, asked, about_model)
        _run(args, tasks, model, ranks, folder, asked, about_model, compare)
    finally:
        if lock.is_held:
            lock.remove()
            lock.release()
    # Not after an error: ranks agree through the job on who tells it.
    model.close()
    if not joined_before:
        from mindspeed_llm.platform import distributed

        distributed.destroy_process_group()
    return 0


def _checked_source(args: Namespace, chosen: Sequence[Chosen]) -> str:
    """Check what can be checked of the model without loading it; what is planned for it, with --check.

    Raises:
        UserError: there is no such model, it has no room for answers, or flags do not fit it.
    """
    from mindspeed_llm.tasks.inference.source import find_source, world_size_of

    world_size = world_size_of(args)
    source = find_source(args, world_size)
    if source.backend == "megatron":
        from mindspeed_llm.tasks.inference.megatron_model import check

        check(args, world_size)
    elif source.kind == "hf":
        from mindspeed_llm.tasks.inference.adapters.hf_files import positions_of

        if (positions := positions_of(source.path)) is not None:
            for one in chosen:
                if isinstance(one.benchmark.answer, Write):
                    check_room(positions, one.benchmark.answer.max_new_tokens)
    if args.check is None:
        return ""
    from mindspeed_llm.tasks.inference.plan import plan_text

    return plan_text(args, source, world_size)


def _print_plan(plan: str | None, tasks: Sequence[Task]) -> None:
    from mindspeed_llm.platform import distributed

    if not distributed.is_rank_zero():
        return
    for task in tasks:
        count = f"{len(task.items)} samples" if task.items else "samples that are made for the model"
        print(f"{task.name:<16} {count}, subjects: {len(task.subjects)}, examples in a prompt: {task.num_fewshot}")
    print(plan or "", flush=True)


def load_tasks(args: Namespace, chosen: Sequence[Chosen]) -> list[Task]:
    """The chosen benchmarks with their data read and checked; lines about flags without effect come to `args.notices`.

    Raises:
        UserError: data are missing or malformed.
    """
    from mindspeed_llm.tasks.evaluation.tasks import load_task

    args.notices += tuple(notice for one in chosen for notice in one.notices)
    tasks = [
        load_task(
            one,
            max_eval_samples=args.max_eval_samples,
            max_new_tokens=args.max_new_tokens,
            instruction_template=args.instruction_template,
        )
        for one in chosen
    ]
    if any(task.benchmark.executes_code for task in tasks):
        from mindspeed_llm.tasks.evaluation.execution.sandbox import check_sandbox

        check_sandbox()
    return tasks


def load_model(args: Namespace) -> LoadedModel:
    """The model that the flags name, asked in the form that they say (a collective).

    Raises:
        UserError: there is no such model, or flags do not fit it.
    """
    from mindspeed_llm.tasks.evaluation.model import EvaluatedModel
    from mindspeed_llm.tasks.evaluation.ranks import Ranks
    from mindspeed_llm.tasks.evaluation.weights import weights_hash
    from mindspeed_llm.tasks.inference.computation import computation
    from mindspeed_llm.tasks.inference.load import load_causal_lm
    from mindspeed_llm.tasks.inference.prompt_format import prompt_format
    from mindspeed_llm.tasks.inference.source import find_source, world_size_of

    source = find_source(args, world_size_of(args))
    lm = load_causal_lm(args, source)
    model = EvaluatedModel(
        lm,
        None if args.no_chat_template else prompt_format(args, lm.tokenizer),
        description=source.description,
        fingerprint=weights_hash(args, source, Ranks()),
        decisive=computation(args, source, lm),
        texts_at_once=args.evaluation_batch_size if "evaluation_batch_size" in args.given else None,
        may_think=args.enable_thinking != "false",
    )
    if model.thinks and args.max_new_tokens is None:
        _warn(
            "this model may think before it answers, for which the usual length of answers is too short: raise it with "
            "--max-new-tokens, or let the model answer at once with --enable-thinking false"
        )
    return model


def _warn(text: str, *values: object) -> None:
    """A warning that all ranks would say, said once."""
    from mindspeed_llm.platform import distributed

    if distributed.is_rank_zero():
        _LOG.warning(text, *values)


def _name(asked: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """A folder's name for these questions to this model."""
    text = json.dumps([asked, model], sort_keys=True, default=str)
    return f"{'_'.join(asked)[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _take(folder: Path, lock: FileLock, asked: Mapping[str, Any], about_model: Mapping[str, Any]) -> None:
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock.take()
    except LockIsHeld as held:
        raise UserError(
            f"--output-dir {folder}: another evaluation ({held.holder}) writes there; wait for it"
        ) from None
    check_same(folder, tasks=asked, model=about_model)


def _run(
    args: Namespace,
    tasks: Sequence[Task],
    model: LoadedModel,
    ranks: Ranks,
    folder: Path,
    asked: Mapping[str, Mapping[str, Any]],
    about_model: Mapping[str, Any],
    compare: dict[str, Any] | None,
) -> None:
    from mindspeed_llm.observability.versions import versions
    from mindspeed_llm.tasks.evaluation.interruption import how_far
    from mindspeed_llm.tasks.evaluation.progress import Progress
    from mindspeed_llm.tasks.evaluation.report import write_report
    from mindspeed_llm.tasks.evaluation.results import REPORT, publish, results_of, sample_rows
    from mindspeed_llm.tasks.evaluation.run import evaluate
    from mindspeed_llm.tasks.evaluation.table import summary_line, table
    from mindspeed_llm.tasks.evaluation.unfinished import Unfinished
    from mindspeed_llm.termination import tells_when_ended

    unfinished = None
    if model.fingerprint is None:
        _warn("the weights cannot be told from others: an interrupted evaluation will begin anew")
    else:
        unfinished = Unfinished(
            folder, {name: {**facts, **decisive(about_model)} for name, facts in asked.items()}, ranks
        )
    samples = sum(len(task.items) for task in tasks)
    _LOG.info("evaluating %s: %d samples; results go to %s", ", ".join(asked), samples, folder)
    progress = Progress(enabled=ranks.rank == 0, copies=model.replicas)
    told = (
        tells_when_ended(lambda: how_far(None if unfinished is None else unfinished.count(), samples))
        if ranks.rank == 0
        else nullcontext()
    )
    try:
        with told:
            results = evaluate(tasks, model, ranks, unfinished=unfinished, on_sample=progress)
    finally:
        progress.close()
    if ranks.rank == 0:
        content = results_of(
            results,
            tasks={task.name: task.described() for task in tasks},
            model=about_model,
            flags={name: getattr(args, name) for name in args.given if name not in _NOT_DECISIVE},
            versions={name: number for name, number in versions().items() if name not in _NOT_VERSIONS},
        )
        with writing(folder):
            publish(folder, content, sample_rows(results))
        for result in results:
            print(table(result), flush=True)
            for warning in result.warnings:
                _LOG.warning("%s", warning)
            _LOG.info("%s", summary_line(result))
        with writing(folder):
            write_report(content, sample_rows(results), folder / REPORT, compare)
    # No rank removes its samples before the results are published.
    ranks.gather_everywhere(None)
    if unfinished is not None and ranks.is_first_of_node:
        unfinished.remove()
