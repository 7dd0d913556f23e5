"""Which beginnings of texts to compute once, and in which order and slots of a cache to compute all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

FORWARD_COST = 64
"""What a forward pass costs besides its tokens, in tokens. A shared beginning becomes a step of its own where it saves
more than this; a text is filled up to the width of a batch by fewer than this.
"""


@dataclass(eq=False)
class Node:
    """Tokens `start` to `end` of all texts below it: a beginning that they share, or the rest of one text."""

    text: int
    """One of the texts, in order of the caller's list."""
    end: int
    ends_here: bool
    """Whether that text has no further token."""
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.parent.end if self.parent is not None else 0

    @property
    def width(self) -> int:
        """Tokens of its own."""
        return self.end - self.start

    @property
    def depth(self) -> int:
        """Nodes before it."""
        depth, node = 0, self
        while node.parent is not None:
            depth, node = depth + 1, node.parent
        return depth


@dataclass(frozen=True, kw_only=True)
class Step:
    """One batch: nodes, the slot that each is computed in, and what is copied before."""

    nodes: tuple[Node, ...]
    slots: tuple[int, ...]
    copies: tuple[tuple[int, int, int], ...]
    """(source, target, positions) of slots."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All steps in order, and the slots that they need."""

    steps: tuple[Step, ...]
    slots: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, those that only fill up batches left out."""
        return sum(node.width for step in self.steps for node in step.nodes)


def build_tree(texts: Sequence[Sequence[int]], forward_cost: int = FORWARD_COST) -> Node:
    """The tree of the beginnings that are worth a step of their own; its root has no token.

    Args:
        texts: token ids, at least one in each, all different.
        forward_cost: see `FORWARD_COST`.
    """
    arrays = [np.asarray(text, dtype=">u4") for text in texts]
    # Big-endian bytes are in the order of the numbers.
    order = sorted(range(len(arrays)), key=lambda number: arrays[number].tobytes())
    root = Node(text=-1, end=0, ends_here=False)
    path = [root]
    inner: list[Node] = []
    for previous, number in zip([None, *order], order, strict=False):
        common = 0 if previous is None else _common(arrays[previous], arrays[number])
        _close(path, inner, common)
        path.append(Node(text=number, end=len(arrays[number]), ends_here=True))
    _close(path, inner, 0)
    # Longest first: what is below a node has been settled before the node is.
    for node in sorted(inner, key=lambda node: -node.end):
        _settle(node, forward_cost)
    return root


def _common(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _close(path: list[Node], inner: list[Node], common: int) -> None:
    """Give their parents to the nodes at the end of `path` that reach beyond `common` tokens."""
    while path[-1].end > common:
        node = path.pop()
        if path[-1].end < common:
            path.append(Node(text=node.text, end=common, ends_here=False))
        node.parent = path[-1]
        if not node.parent.children and node.parent.end > 0:
            inner.append(node.parent)
        node.parent.children.append(node)


def _settle(node: Node, forward_cost: int) -> None:
    """Dissolve a shared beginning that saves too little: each text below computes its tokens by itself."""
    parent = node.parent
    assert parent is not None
    num_users = len(node.children) + node.ends_here
    if (num_users - 1) * node.width >= forward_cost:
        return
    for child in node.children:
        child.parent = parent
    parent.children += node.children
    node.children = []
    if not node.ends_here:
        parent.children.remove(node)


def make_plan(
    root: Node,
    *,
    max_rows: int,
    max_tokens: int,
    max_positions: int | None,
    length: int,
    forward_cost: int = FORWARD_COST,
) -> Plan:
    """Steps that compute all nodes, each after its parent.

    Args:
        root: of `build_tree`.
        max_rows: nodes of a batch, at most.
        max_tokens: tokens of a batch, at most, where it has more than one node.
        max_positions: positions of all slots together, at most, but at least one slot for each level of the tree;
            None: as many as `max_rows` needs.
        length: positions of a slot.
        forward_cost: see `FORWARD_COST`.
    """
    levels = 1 + max((child.depth for child in _below(root)), default=0)
    rows = max_rows if max_positions is None else max(1, min(max_rows, max_positions // (length * levels)))
    return _Planner(max_rows=rows, max_tokens=max_tokens, forward_cost=forward_cost).plan(root)


def _below(root: Node) -> Iterable[Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


@dataclass
class _Planner:
    """Depth first, so that few beginnings are held at once; the children of a whole batch together, so that batches are
    full.
    """

    max_rows: int
    max_tokens: int
    forward_cost: int
    steps: list[Step] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    num_slots: int = 0
    slot_of: dict[Node, int] = field(default_factory=dict)
    waiting: dict[Node, int] = field(default_factory=dict)
    """Children that are still to be computed."""
    content: dict[int, Node] = field(default_factory=dict)
    """The node that was computed last in a slot: its parent's tokens are there as well."""

    def plan(self, root: Node) -> Plan:
        todo = [self._batches(root.children)]
        while todo:
            if not todo[-1]:
                todo.pop()
                continue
            batch = todo[-1].pop(0)
            self._step(batch, root)
            if children := [child for node in batch for child in node.children]:
                todo.append(self._batches(children))
        return Plan(steps=tuple(self.steps), slots=self.num_slots)

    def _batches(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """Nodes of similar width together, the widest first."""
        batches: list[list[Node]] = []
        for node in sorted(nodes, key=lambda node: (-node.width, node.text)):
            if batches:
                widest = batches[-1][0].width
                fits = len(batches[-1]) < self.max_rows and (len(batches[-1]) + 1) * widest <= self.max_tokens
                if fits and widest - node.width < self.forward_cost:
                    batches[-1].append(node)
                    continue
            batches.append([node])
        return batches

    def _step(self, batch: Sequence[Node], root: Node) -> None:
        copies, moved = [], []
        for node in batch:
            parent = node.parent
            assert parent is not None
            if parent is root:
                slot = self._free_slot(None)
            else:
                self.waiting[parent] -= 1
                source = self.slot_of[parent]
                if self.waiting[parent] == 0:
                    slot = source  # nobody else needs what stands behind the parent's tokens
                    moved.append(parent)
                else:
                    slot = self._free_slot(parent)
                    held = self.content.get(slot)
                    if held is None or held.parent is not parent:
                        copies.append((source, slot, parent.end))
            self.slot_of[node] = slot
        for node in batch:
            self.content[self.slot_of[node]] = node
            self.waiting[node] = len(node.children)
        self.steps.append(
            Step(nodes=tuple(batch), slots=tuple(self.slot_of[node] for node in batch), copies=tuple(copies))
        )
        for parent in moved:
            del self.slot_of[parent]
        for node in batch:
            if not node.children:
                self.free.append(self.slot_of.pop(node))

    def _free_slot(self, parent: Node | None) -> int:
        """A slot that is free, rather one in which the parent's tokens are already."""
        for place, slot in enumerate(self.free):
            held = self.content.get(slot)
            if parent is not None and held is not None and held.parent is parent:
                return self.free.pop(place)
        if self.free:
            return self.free.pop()
        self.num_slots += 1
        return self.num_slots - 1
