"""Ask a model all questions, on all its copies, and judge what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.tasks.evaluation.judge import BenchmarkResult, SampleResult, judge, summarise
from mindspeed_llm.tasks.evaluation.ranks import Ranks
from mindspeed_llm.tasks.evaluation.requests import Answer, Generate, Model
from mindspeed_llm.tasks.evaluation.sharing import Block, blocks_of, share
from mindspeed_llm.tasks.evaluation.tasks import Item, Task
from mindspeed_llm.tasks.evaluation.unfinished import Finished, Unfinished

_LOG = get_logger("evaluation")


class LoadedModel(Model, Protocol):
    """A model, this rank's part in it, and what tells it from others."""

    replica: int
    """Which copy of the model this rank has a part of."""
    replicas: int
    is_first_of_replica: bool
    """Whether this rank speaks for its copy."""
    batch_size: int
    max_length: int
    """Positions that it has for a text."""
    description: str
    fingerprint: str | None
    """Hash of its weights; None where they cannot be told from others."""
    decisive: Mapping[str, Any]
    """What else decides its answers: how it computes, and the form that prompts get."""

    def encode(self, text: str) -> Sequence[int]:
        """The token ids of a text."""
        ...

    def close(self) -> None:
        """Let go of what was set up for it."""
        ...

    def shown(self, prompt: str) -> str:
        """The whole text that the model sees for a prompt."""
        ...


def evaluate(
    tasks: Sequence[Task],
    model: LoadedModel,
    ranks: Ranks,
    *,
    unfinished: Unfinished | None = None,
    on_sample: Callable[[int, int], None] | None = None,
) -> list[BenchmarkResult]:
    """The results of each task (a collective); an empty list on all ranks but the first.

    Args:
        unfinished: keeps samples on the disk; None: they are lost when the process ends.
        on_sample: told (samples that this copy of the model has answered, all that it has to) after each one.

    Raises:
        ValueError: the model's answers are not of the kind asked for.
    """
    finished: dict[str, Finished] = unfinished.read() if unfinished is not None else {task.name: {} for task in tasks}
    blocks = blocks_of(tasks, batch_size=model.batch_size, replicas=model.replicas)
    missing = [block for block in blocks if not _is_finished(block, finished[block.task.name])]
    mine = share(missing, model.replicas)[model.replica]
    count, total = 0, sum(block.stop - block.start for block in mine)
    own: list[tuple[str, SampleResult]] = []
    for number, block in enumerate(mine):

        def on_answer() -> None:
            nonlocal count
            count += 1
            if on_sample is not None:
                on_sample(count, total)

        samples = _work_on(block, model, on_answer)
        # Judging may take minutes, for which the other ranks of the copy would wait within a collective.
        ranks.follow(f"copy {model.replica}, block {number}", leads=model.is_first_of_replica)
        own += [(block.task.name, sample) for sample in samples]
        if unfinished is not None and samples:
            unfinished.add(block.task.name, samples)
    if unfinished is not None:
        unfinished.close()
    gathered = ranks.gather(own)
    if ranks.rank != 0:
        return []
    for part in gathered:
        for name, sample in part:
            finished[name][sample.subject, sample.index] = sample
    return [_result(task, finished[task.name], model) for task in tasks]


def _is_finished(block: Block, finished: Finished) -> bool:
    # A block of which a part is missing is asked again as a whole: what is computed together decides the last bits.
    return all(_key(item) in finished for item in block.items)


def _key(item: Item) -> tuple[str, int]:
    return item.subject.name, item.document.index


def _work_on(block: Block, model: LoadedModel, on_answer: Callable[[], None]) -> list[SampleResult]:
    """The judged samples of a block, on the rank that speaks for its copy of the model; none on the others."""
    items = block.items
    answers: dict[int, Answer] = {}

    def take(place: int, answer: Answer) -> None:
        answers[place] = answer
        on_answer()

    model.answer([item.question for item in items], take)
    if not model.is_first_of_replica:
        return []
    if block.task.benchmark.executes_code:
        _LOG.info("running the programs of %d answers of %s", len(items), block.task.name)
    return [
        judge(block.task.benchmark, item.subject, item.document, "", answers[place]) for place, item in enumerate(items)
    ]


def _result(task: Task, finished: Finished, model: LoadedModel) -> BenchmarkResult:
    samples = [replace(finished[_key(item)], prompt=model.shown(_text(item))) for item in task.items]
    return summarise(task.benchmark, samples)


def _text(item: Item) -> str:
    return item.question.prompt if isinstance(item.question, Generate) else item.question.context
