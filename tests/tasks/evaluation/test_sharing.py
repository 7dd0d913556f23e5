"""Documents are shared out exactly, whatever their number and that of the copies."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mindspeed_llm.tasks.evaluation.benchmark import Document, Subject
from mindspeed_llm.tasks.evaluation.benchmarks import boolq, gsm8k
from mindspeed_llm.tasks.evaluation.sharing import blocks_of, share
from tests.tasks.evaluation.models import task_of


def _subjects(sizes: list[int], fields: dict) -> tuple[Subject, ...]:
    return tuple(
        Subject(
            name=f"subject {number}",
            documents=tuple(
                Document(subject=f"subject {number}", index=index, place="", fields={**fields, "question": f"q{index}"})
                for index in range(size)
            ),
            shots=(Document(subject="", index=0, place="", fields=fields),) * 5,
        )
        for number, size in enumerate(sizes)
    )


_CHOSEN = {"passage": "P", "answer": True}
_WRITTEN = {"question": "How many?", "answer": "#### 3"}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 7])
def test_every_document_is_in_one_share(seed: int, replicas: int) -> None:
    draw = random.Random(seed)
    tasks = [
        task_of(boolq.BENCHMARK, _subjects([draw.choice([1, 3, 64, 65, 200]) for _ in range(3)], _CHOSEN)),
        task_of(gsm8k.BENCHMARK, _subjects([draw.choice([1, 2, 130])], _WRITTEN)),
    ]
    blocks = blocks_of(tasks, batch_size=8, replicas=replicas)
    assert len(blocks) >= min(replicas, sum(len(task.items) for task in tasks))
    shares = share(blocks, replicas)
    found = Counter(
        (block.task.name, item.document.subject, item.document.index)
        for blocks_of_one in shares
        for block in blocks_of_one
        for item in block.items
    )
    wanted = [(task.name, item.document.subject, item.document.index) for task in tasks for item in task.items]
    assert found == Counter(wanted)
    assert max(found.values()) == 1
    for block in blocks:
        assert len({item.document.subject for item in block.items}) == 1
    loads = [sum(block.cost() for block in part) for part in shares]
    assert max(loads) - min(loads) <= max(block.cost() for block in blocks)


def test_blocks_do_not_depend_on_the_copies_where_there_are_enough() -> None:
    task = task_of(boolq.BENCHMARK, _subjects([200, 70], _CHOSEN))
    cuts = {
        replicas: [(block.start, block.stop) for block in blocks_of([task], batch_size=8, replicas=replicas)]
        for replicas in (1, 2, 6, 7)
    }
    assert cuts[1] == cuts[2] == cuts[6] == [(0, 50), (50, 100), (100, 150), (150, 200), (200, 235), (235, 270)]
    assert cuts[7] == [(0, 25), (25, 50), *cuts[1][1:]]
    one = task_of(boolq.BENCHMARK, _subjects([1], _CHOSEN))
    assert [len(part) for part in share(blocks_of([one], batch_size=8, replicas=4), 4)] == [1, 0, 0, 0]


def test_blocks_of_written_answers_hold_several_batches() -> None:
    task = task_of(gsm8k.BENCHMARK, _subjects([300], _WRITTEN))
    assert [block.stop - block.start for block in blocks_of([task], batch_size=32, replicas=1)] == [150, 150]
