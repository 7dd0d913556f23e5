"""How likely continuations are after their contexts; what texts have in common at their beginnings is computed once.

Of one call with the same pairs, in the same order, all numbers are the same bit for bit: what is computed together is a
function of the pairs alone. Work that is spread over ranks therefore gives the same numbers on any number of ranks when
it is divided into the same calls on all of them (such as one for each block of questions) and a rank makes some of
these calls; other divisions agree to rounding. Equal rows of one call have equal numbers, and continuations that differ
in their last token alone are read off the same logits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mindspeed_llm.tasks.inference.backend import Backend, Batch, Cache
from mindspeed_llm.tasks.inference.damage import refuse_damaged
from mindspeed_llm.tasks.inference.pairs import Pair, Row, to_row
from mindspeed_llm.tasks.inference.prefix_tree import Node, Step, build_tree, make_plan

_LOG = logging.getLogger("mindspeed_llm")

_MAX_ROWS = 64
_MAX_TOKENS = 2048
"""Of one forward pass: enough to keep any device busy."""
_MAX_POSITIONS = 16384
"""Of the cache, unless a single text for each level of the tree needs more."""
_MAX_LOGITS = 2**26
"""Numbers in the logits of one forward pass: 256 MiB in fp32."""


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """What a model says of a continuation."""

    logprob: float
    """Sum of the natural logarithms of its tokens' probabilities."""
    is_greedy: bool
    """Whether each of its tokens is the most probable one at its place."""
    tokens: int
    """How many they are."""


def pair_likelihoods(
    backend: Backend,
    pairs: Sequence[Pair],
    *,
    batch_size: int | None = None,
    on_done: Callable[[int, Likelihood], None] | None = None,
) -> list[Likelihood]:
    """The likelihood of each pair's continuation. Ranks that share a copy of a model make the same calls.

    Args:
        backend: the model.
        pairs: of `encode_pairs`. A context that is too long for the model loses its beginning, with one warning.
        batch_size: the most texts of one forward pass; None: as many as are useful.
        on_done: called with the position of a pair and its result, as soon as there is one.

    Raises:
        UserError: a continuation is longer than the model has positions, the memory for the cache is not there, or the
            model's logits are not numbers.
    """
    rows = [to_row(pair, backend.max_length) for pair in pairs]
    num_cut = sum(len(pair.context) + len(pair.continuation) > backend.max_length + 1 for pair in pairs)
    if num_cut:
        _LOG.warning(
            "%d of %d texts are longer than the %d positions of the model: the beginnings of their contexts are left "
            "out. Fewer examples in a prompt make it shorter.",
            num_cut,
            len(pairs),
            backend.max_length,
        )
    return row_likelihoods(backend, rows, batch_size=batch_size, on_done=on_done)


def row_likelihoods(
    backend: Backend,
    rows: Sequence[Row],
    *,
    batch_size: int | None = None,
    on_done: Callable[[int, Likelihood], None] | None = None,
) -> list[Likelihood]:
    """As `pair_likelihoods`, of rows that fit the model."""
    if not rows:
        return []
    texts = list(dict.fromkeys(row.inputs for row in rows))
    length = max(map(len, texts))
    root = build_tree(texts)
    plan = make_plan(
        root,
        max_rows=batch_size or _MAX_ROWS,
        max_tokens=_MAX_TOKENS,
        max_positions=None if batch_size else _MAX_POSITIONS,
        length=length,
    )
    wanted = _wanted(root, texts, rows)
    sums = _Sums(rows, on_done)
    cache = backend.new_cache(plan.slots, length)
    for step in plan.steps:
        _copy(cache, step)
        _run(backend, cache, step, texts, wanted, sums)
    return sums.results()


_Wanted = dict[Node, dict[int, list[tuple[int, int]]]]
"""Node -> position in the text -> (row, target) whose probability stands in the logits after that position."""


def _wanted(root: Node, texts: Sequence[tuple[int, ...]], rows: Sequence[Row]) -> _Wanted:
    ends: dict[tuple[int, ...], Node] = {}
    waiting = list(root.children)
    while waiting:
        last = waiting.pop()
        waiting += last.children
        if last.ends_here:
            ends[texts[last.text]] = last
    wanted: _Wanted = {}
    for number, row in enumerate(rows):
        first = len(row.inputs) - len(row.targets)
        node: Node | None = ends[row.inputs]
        while node is not None and node.end > first:
            at = wanted.setdefault(node, {})
            for position in range(max(node.start, first), node.end):
                at.setdefault(position, []).append((number, row.targets[position - first]))
            node = node.parent
    return wanted


def _copy(cache: Cache, step: Step) -> None:
    by_length: dict[int, tuple[list[int], list[int]]] = {}
    for source, target, positions in step.copies:
        sources, targets = by_length.setdefault(positions, ([], []))
        sources.append(source)
        targets.append(target)
    for positions, (sources, targets) in by_length.items():
        cache.copy(sources, targets, positions)


def _run(
    backend: Backend,
    cache: Cache,
    step: Step,
    texts: Sequence[tuple[int, ...]],
    wanted: _Wanted,
    sums: _Sums,
) -> None:
    """Compute the nodes of a step, in pieces where tokens or logits would be too many at once."""
    begin = 0
    width = max(node.width for node in step.nodes)
    while begin < width:
        going = [(node, slot) for node, slot in zip(step.nodes, step.slots, strict=True) if node.width > begin]
        end = _piece_end(going, begin, width, wanted, backend.vocab_size)
        tokens = torch.zeros(len(going), end - begin, dtype=torch.int64)
        widths, places, users = [], [], []
        for number, (node, _) in enumerate(going):
            piece = texts[node.text][node.start + begin : min(node.start + end, node.end)]
            tokens[number, : len(piece)] = torch.tensor(piece, dtype=torch.int64)
            widths.append(len(piece))
            for position, asked in sorted(wanted.get(node, {}).items()):
                column = position - node.start - begin
                if 0 <= column < len(piece):
                    places.append((number, column))
                    users.append(asked)
        if not places:  # of a beginning nothing is wanted but what the cache keeps; a backend computes some logits
            places, users = [(0, 0)], [[]]
        logits = backend.forward(
            Batch(
                tokens=tokens,
                widths=widths,
                slots=[slot for _, slot in going],
                starts=[node.start + begin for node, _ in going],
                wanted=places,
            ),
            cache,
        )
        sums.add(logits, users)
        begin = end


def _piece_end(going: Sequence[tuple[Node, int]], begin: int, width: int, wanted: _Wanted, vocab_size: int) -> int:
    """The column behind the last one that the next forward pass takes in: at least one column."""
    most = max(_MAX_LOGITS // vocab_size, 1)
    end = min(width, begin + max(_MAX_TOKENS // len(going), 1))
    columns = [0] * (end - begin)
    for node, _ in going:
        for position in wanted.get(node, {}):
            if begin <= position - node.start < end:
                columns[position - node.start - begin] += 1
    total = 0
    for number, count in enumerate(columns):
        total += count
        if total > most and number:
            return begin + number
    return end


class _Sums:
    """Collects the probabilities of tokens until all of a row are there."""

    def __init__(self, rows: Sequence[Row], on_done: Callable[[int, Likelihood], None] | None) -> None:
        self._missing = [len(row.targets) for row in rows]
        self._lengths = list(self._missing)
        self._logprobs: list[list[float]] = [[] for _ in rows]
        self._is_greedy = [True] * len(rows)
        self._results: list[Likelihood | None] = [None] * len(rows)
        self._on_done = on_done

    def add(self, logits: Tensor, users: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Take in logits [places, vocabulary], each with the (row, target) that read them."""
        flat = [(place, row, target) for place, asked in enumerate(users) for row, target in asked]
        if not flat:
            return
        logprobs = logits.float().log_softmax(-1)
        largest, best_tokens = logprobs.max(-1)
        refuse_damaged(largest)
        best = best_tokens.tolist()
        places = torch.tensor([place for place, _, _ in flat], device=logits.device)
        targets = torch.tensor([target for _, _, target in flat], device=logits.device)
        for (place, row, target), value in zip(flat, logprobs[places, targets].tolist(), strict=True):
            self._logprobs[row].append(value)
            self._is_greedy[row] &= best[place] == target
            self._missing[row] -= 1
            if not self._missing[row]:
                self._finish(row)

    def _finish(self, row: int) -> None:
        # Exactly rounded, so that the order in which tokens were computed leaves no trace.
        result = Likelihood(
            logprob=math.fsum(self._logprobs[row]), is_greedy=self._is_greedy[row], tokens=self._lengths[row]
        )
        self._results[row] = result
        if self._on_done is not None:
            self._on_done(row, result)

    def results(self) -> list[Likelihood]:
        """One for each row."""
        assert not any(self._missing)
        return [result for result in self._results if result is not None]
