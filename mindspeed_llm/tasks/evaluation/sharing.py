"""Which copy of the model answers what.

Documents are worked on in blocks: neighbours of one subject, whose prompts begin alike. A block is asked in one call,
wherever it is worked on, and is cut the same for any number of copies, so that numbers do not depend on it, not even in
their last bit. Only where there are fewer blocks than copies are blocks cut further.

    subject a [ block ][ block ]  subject b [ block ]     the next block goes to the copy that has least to do
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_llm.tasks.evaluation.requests import Generate
from mindspeed_llm.tasks.evaluation.tasks import Item, Task

_BLOCK_DOCUMENTS = 64
_BATCHES = 8
"""Of generation: the last texts of a block are fewer than a batch, which should be a small part of the work."""
_COST_OF_NEW_TOKEN = 8
"""In characters of a prompt, which are computed many at a time."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Documents that are asked together, by their places among the task's items."""

    task: Task
    start: int
    stop: int

    @property
    def items(self) -> tuple[Item, ...]:
        """Its documents."""
        return self.task.items[self.start : self.stop]

    def cost(self) -> int:
        """How much work it is, roughly."""
        items = self.items
        # The beginning that all prompts share is computed once.
        prompts = len(_prompt(items[0])) + sum(_own_length(item) for item in items[1:])
        return prompts + sum(
            _COST_OF_NEW_TOKEN * item.question.max_new_tokens for item in items if isinstance(item.question, Generate)
        )


def _prompt(item: Item) -> str:
    return item.question.prompt if isinstance(item.question, Generate) else item.question.context


def _own_length(item: Item) -> int:
    texts = [str(value) for value in item.document.fields.values()]
    return sum(map(len, texts))


def blocks_of(tasks: Sequence[Task], *, batch_size: int, replicas: int) -> list[Block]:
    """All documents of all tasks, each in exactly one block, in their order."""
    runs = []
    for task in tasks:
        start = 0
        for place, item in enumerate(task.items):
            is_last = place + 1 == len(task.items) or task.items[place + 1].subject is not item.subject
            if is_last:
                runs.append((task, start, place + 1))
                start = place + 1
    blocks = []
    for task, start, stop in runs:
        limit = _BLOCK_DOCUMENTS
        if isinstance(task.items[start].question, Generate):
            limit = max(limit, _BATCHES * batch_size)
        blocks += _cut(Block(task=task, start=start, stop=stop), math.ceil((stop - start) / limit))
    while len(blocks) < replicas:
        largest = max(range(len(blocks)), key=lambda place: blocks[place].stop - blocks[place].start)
        if blocks[largest].stop - blocks[largest].start == 1:
            break
        blocks[largest : largest + 1] = _cut(blocks[largest], 2)
    return blocks


def _cut(block: Block, parts: int) -> list[Block]:
    count = block.stop - block.start
    borders = [block.start + count * part // parts for part in range(parts + 1)]
    return [Block(task=block.task, start=borders[part], stop=borders[part + 1]) for part in range(parts)]


def share(blocks: Sequence[Block], replicas: int) -> list[list[Block]]:
    """The blocks of each copy, each block at exactly one: the most costly first, to the copy with least to do."""
    loads = [0] * replicas
    shares: list[list[int]] = [[] for _ in range(replicas)]
    costs = [block.cost() for block in blocks]
    for place in sorted(range(len(blocks)), key=lambda place: -costs[place]):
        least = min(range(replicas), key=loads.__getitem__)
        loads[least] += costs[place]
        shares[least].append(place)
    return [[blocks[place] for place in sorted(places)] for places in shares]
