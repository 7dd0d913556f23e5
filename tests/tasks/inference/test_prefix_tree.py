"""Plans of shared beginnings, carried out by hand on texts alone, and their costs."""

from __future__ import annotations

import random

import pytest

from mindspeed_llm.tasks.inference.prefix_tree import Plan, build_tree, make_plan

Texts = list[tuple[int, ...]]


def _plan(texts: Texts, *, forward_cost: int = 1, max_rows: int = 4, max_tokens: int = 64, positions=None) -> Plan:
    return make_plan(
        build_tree(texts, forward_cost),
        max_rows=max_rows,
        max_tokens=max_tokens,
        max_positions=positions,
        length=max(map(len, texts)),
        forward_cost=forward_cost,
    )


def _carried_out(plan: Plan, texts: Texts) -> set[int]:
    """Fill slots as the plan says; every node must find its text's beginning. Returns the texts that were finished."""
    slots: list[tuple[int, ...]] = [()] * plan.slots
    finished = set()
    for step in plan.steps:
        copied = {target: slots[source][:length] for source, target, length in step.copies}
        for source, _, length in step.copies:
            assert len(slots[source]) >= length
        for target, content in copied.items():
            slots[target] = content
        assert len(set(step.slots)) == len(step.slots)
        for node, slot in zip(step.nodes, step.slots, strict=True):
            assert slots[slot][: node.start] == texts[node.text][: node.start]
            slots[slot] = texts[node.text][: node.end]
            if node.ends_here:
                assert slots[slot] == texts[node.text]
                finished.add(node.text)
    return finished


def _random_texts(seed: int) -> Texts:
    """Texts that grow out of each other at random places, with few different tokens."""
    rng = random.Random(seed)
    texts: set[tuple[int, ...]] = {(1,)}
    for _ in range(rng.randint(1, 40)):
        old = rng.choice(sorted(texts))
        beginning = old[: rng.randint(0, len(old))]
        texts.add((*beginning, *(rng.randint(0, 2) for _ in range(rng.randint(1, 12)))))
    return sorted(texts, key=lambda text: (rng.random(), text))


@pytest.mark.parametrize("forward_cost", [1, 4, 1000])
@pytest.mark.parametrize("max_rows", [1, 3, 50])
def test_every_text_is_computed_from_beginnings_that_are_there(forward_cost: int, max_rows: int) -> None:
    for seed in range(60):
        texts = _random_texts(seed)
        plan = _plan(texts, forward_cost=forward_cost, max_rows=max_rows)
        assert _carried_out(plan, texts) == set(range(len(texts)))
        assert all(len(step.nodes) <= max_rows for step in plan.steps)


@pytest.mark.parametrize("seed", range(5))
def test_at_no_cost_of_a_step_each_beginning_is_computed_once(seed: int) -> None:
    texts = _random_texts(seed)
    different = {text[:end] for text in texts for end in range(1, len(text) + 1)}
    assert _plan(texts).num_tokens == len(different)
    # With steps that cost more than anything saves, every text stands alone.
    assert _plan(texts, forward_cost=10**6).num_tokens == sum(map(len, texts))


def test_examples_of_a_subject_are_computed_once() -> None:
    shots = {subject: tuple(range(subject, subject + 600)) for subject in (1000, 3000)}
    texts = [(*shots[subject], *range(10 * n, 10 * n + 90)) for subject in shots for n in range(7)]
    plan = _plan(texts, forward_cost=64, max_rows=64, max_tokens=2048)
    assert plan.num_tokens == 2 * 600 + 14 * 90
    assert len(plan.steps) == 2
    # Two slots for the examples, which two of the questions take over.
    assert plan.slots == 14
    assert _carried_out(plan, texts) == set(range(14))


def test_a_beginning_that_saves_less_than_a_step_is_dissolved() -> None:
    texts = [(*range(20), 100, *range(200, 210)), (*range(20), 101, *range(200, 210))]
    assert _plan(texts, forward_cost=64).num_tokens == 62
    assert _plan(texts, forward_cost=20).num_tokens == 42


def test_slots_are_few_where_positions_are() -> None:
    texts = [(*range(50), n, *range(n, n + 30)) for n in range(100, 140)]
    plan = _plan(texts, max_rows=64, max_tokens=10**6, positions=81 * 8)
    assert plan.slots <= 8
    assert _carried_out(plan, texts) == set(range(40))
    # A talk that grows turn by turn stays in one slot.
    talk = [tuple(range(30 * turn)) for turn in range(1, 12)]
    plan = _plan(talk, max_rows=64)
    assert (plan.slots, plan.num_tokens) == (1, 330)
    assert not any(step.copies for step in plan.steps)
