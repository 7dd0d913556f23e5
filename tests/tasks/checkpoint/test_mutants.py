"""Deliberate faults in where values, layers and experts stand, and which check sees each.

Two kinds of faults, and two kinds of checks. Both directions follow the same rules, so a fault in a *rule* gives an
output that converts back bit for bit: only what others have written shows it. A fault in *moving* values, which the
rules place rightly, is seen by the default verification (`--verify sample`), and nothing is published.

    fault                                       where it is planted             what sees it
    ------------------------------------------------------------------------------------------------------------------
    in a rule
      order of query, key, value; of a bias     test_reference, here            reference files
      halves of heads (rotary positions)        test_golden                     tables by hand
      gate | up swapped, cut after stacking     test_reference, test_golden,    reference files, tables by hand
                                                here
      order of experts; their shares            test_reference, here            reference files
      order of ranks, columns dealt out         test_reference, here            reference files
      vocabulary: not cut, padded at the start  test_reference, test_golden     reference files, tables by hand;
                                                                                not cut: the accounting of a conversion
      padded rows kept                          test_verify                     round trip; the accounting
      noop layers, virtual stages, dualpipev,   here                            reference files, places by hand
      layer lists, ends of the pipeline
      which ranks have a file                   here                            reference files, pairs by hand
      order of MTP layers                       here                            by hand (test_convert)
    in moving values
      query, key, value; gate and up; experts;  test_verify                     default verification
      padding; lost, shifted, renamed tensors
      one bit                                   test_verify                     --verify full
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.tasks.checkpoint import layout, mg_reader, model, plan, rules, sources
from tests.tasks.checkpoint import test_convert, test_layout, test_reference, toys
from tests.tasks.checkpoint.test_layout import EP, ETP, LIST, NOOP, PP, TP, VPP

Fault = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault."""

    places: tuple[tuple[Any, str], ...]
    """(owner, attribute) of the function that is patched; several where it is imported by name."""
    fault: Fault
    family: str
    """Whose reference file shows it, and on whose small model it is planted."""
    flags: tuple[str, ...]
    """Of a conversion in which it changes the output."""
    by_hand: Callable[[Path], None] | None = None
    """A test with numbers written by hand that sees it, too."""
    reference: bool = True
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the small model's config.json."""


# Rules


def _of_parts(change: Callable[[Any, list[rules.Part], rules.Share], Any]) -> Fault:
    """Another answer of a rule; None leaves it as it is."""

    def fault(original: Callable[..., Any]) -> Callable[..., Any]:
        def place(self: Any, parts: list[rules.Part], share: rules.Share) -> Any:
            changed = change(self, list(parts), share)
            return original(self, parts, share) if changed is None else changed

        return place

    return fault


def _dealt_columns(rule: rules.Joined, parts: list[rules.Part], share: rules.Share) -> rules.Placed | None:
    """Column after column to rank after rank, instead of a run of columns to each."""
    if rule.split != 1 or len(parts) > 1 or share.count == 1:
        return None
    [part] = parts
    rows, columns = part.shape
    mine = range(share.index, columns, share.count)
    pieces = [
        (part.name, part.piece({1: (column, column + 1)}, to=(0, 1), start=(0, at))) for at, column in enumerate(mine)
    ]
    shape = (rows, len(mine))
    return rules.Placed(shape=shape, view=shape, pieces=tuple(pieces))


def _cut_after_stacking(rule: rules.Joined, parts: list[rules.Part], share: rules.Share) -> rules.Placed | None:
    """All of gate to the first of two ranks, all of up to the second."""
    if rule.split != 0 or rule.axis != 0 or len(parts) != 2 or share.count != 2:
        return None
    part = parts[share.index]
    axes = range(len(part.shape))
    pieces = ((part.name, part.piece({}, to=axes, start=[0] * len(part.shape))),)
    return rules.Placed(shape=part.shape, view=part.shape, pieces=pieces)


def _in_file_order(rule: rules.GroupedQkv, parts: list[rules.Part], share: rules.Share) -> rules.Placed | None:
    """All query heads, then all key heads, then all value heads: right for as many groups as heads only."""
    if share.count > 1 or len(parts[0].shape) != 3:
        return None
    placed = rules.Joined().place(parts, share)
    heads, *rest = placed.view
    groups = parts[1].shape[0]
    per_group = heads // groups
    pieces = []
    end = 0
    for part in parts:
        for head in range(part.shape[0]):
            at = (end // per_group, end % per_group, *(0 for _ in rest))
            pieces.append((part.name, part.piece({0: (head, head + 1)}, to=(1, 2, 3), start=at)))
            end += 1
    return rules.Placed(shape=placed.shape, view=(groups, per_group, *rest), pieces=tuple(pieces))


def _biases_swapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Key and value of biases change places, those of weights do not."""

    def place(self: Any, parts: list[rules.Part], share: rules.Share) -> Any:
        query, key, value = parts
        return original(self, [query, value, key] if len(query.shape) == 2 else parts, share)

    return place


# Places of layers, files and experts


def _noops_one_later(original: Callable[..., Any]) -> Callable[..., Any]:
    def place(topology: layout.Topology, layers: list[int]) -> Any:
        count = len(layers) + len(topology.noop_layers)
        return original(replace(topology, noop_layers=tuple((n + 1) % count for n in topology.noop_layers)), layers)

    return place


def _numbers_without_noops(original: Callable[..., Any]) -> Callable[..., Any]:
    """Local numbers that leave no gap for a noop layer."""

    def place(topology: layout.Topology, layers: list[int]) -> Any:
        chunks = original(topology, layers)
        return [replace(chunk, layers=[(at, layer) for at, (_, layer) in enumerate(chunk.layers)]) for chunk in chunks]

    return place


def _stage_by_stage(original: Callable[..., Any]) -> Callable[..., Any]:
    """Virtual stages of one stage one after the other, instead of turn by turn over the stages."""

    def blocks(topology: layout.Topology, count: int) -> Any:
        of_stages = original(topology, count)
        depth = topology.layers_per_virtual_stage
        if depth is None:
            return of_stages
        virtual = len(of_stages[0])
        return [
            [range((stage * virtual + v) * depth, (stage * virtual + v + 1) * depth) for v in range(virtual)]
            for stage in range(topology.pp)
        ]

    return blocks


def _tails_in_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """The way back of dualpipev runs through the stages in the same order as the way there."""

    def dualpipev(topology: layout.Topology, count: int) -> Any:
        of_stages = original(topology, count)
        tails = [tail for _, tail in of_stages][::-1]
        return [[head, tail] for (head, _), tail in zip(of_stages, tails, strict=True)]

    return dualpipev


def _list_reversed(original: Callable[..., Any]) -> Callable[..., Any]:
    def blocks(topology: layout.Topology, count: int) -> Any:
        stage_list = topology.num_layer_list
        return original(replace(topology, num_layer_list=stage_list[::-1]) if stage_list else topology, count)

    return blocks


def _end_on_the_last_stage(original: Callable[..., Any]) -> Callable[..., Any]:
    """The final norm and the output layer in the last chunk of the last stage, where dualpipev has the middle."""

    def place(topology: layout.Topology, layers: list[int]) -> Any:
        chunks = original(topology, layers)
        return [replace(chunk, last=number == len(chunks) - 1) for number, chunk in enumerate(chunks)]

    return place


def _shares_by_tensor_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whole experts over TP x EP instead of EP x TP."""

    def expert_range(topology: layout.Topology, rank: layout.Rank, count: int) -> range:
        if not topology.moe_tp_extend_ep:
            return original(topology, rank, count)
        share = count // topology.expert_shares
        index = rank.tp * topology.ep + rank.ep
        return range(index * share, (index + 1) * share)

    return expert_range


def _all_pairs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Files of ranks that whole experts do not need."""
    return lambda topology, *stages: original(replace(topology, etp=None), *stages)


def _mtp_reversed(original: Callable[..., Any]) -> Callable[..., Any]:
    def place(self: model.Model, mtp: int) -> Any:
        spot, last = original(self, mtp), self.topology.mtp_num_layers - 1
        return replace(original(self, last - mtp), mg_prefix=spot.mg_prefix, numbers=spot.numbers)

    return place


def _places_by_hand(_: Path) -> None:
    for row in test_layout.PLACES:
        test_layout.test_places(*row)


def _pairs_by_hand(_: Path) -> None:
    test_layout.test_whole_experts_need_fewer_files()


PLACE = ((layout, "place"), (model, "place"))
RANKS = ((layout, "ranks"), (plan, "ranks"), (sources, "ranks"), (test_layout, "ranks"))
BLOCKS = ((layout, "blocks"), (mg_reader, "blocks"))
MOE = "qwen3-moe"
MUTANTS = {
    "columns are dealt out one by one": Mutant(
        places=((rules.Joined, "place"),), fault=_of_parts(_dealt_columns), family="qwen3", flags=(TP, "2")
    ),
    "gate and up are stacked before they are cut": Mutant(
        places=((rules.Joined, "place"),), fault=_of_parts(_cut_after_stacking), family="qwen3", flags=(TP, "2")
    ),
    "query, key and value stand one after the other": Mutant(
        places=((rules.GroupedQkv, "place"),), fault=_of_parts(_in_file_order), family="qwen3", flags=()
    ),
    "biases of key and value change places": Mutant(
        places=((rules.GroupedQkv, "place"),), fault=_biases_swapped, family="qwen25", flags=(TP, "2")
    ),
    "noop layers stand one position later": Mutant(
        places=(*PLACE, (test_layout, "place")),
        fault=_noops_one_later,
        family="qwen3",
        flags=(PP, "2", NOOP, "0,5"),
        by_hand=_places_by_hand,
    ),
    "noop layers have no number": Mutant(
        places=(*PLACE, (test_layout, "place")),
        fault=_numbers_without_noops,
        family="qwen3",
        flags=(PP, "2", NOOP, "0,5"),
        by_hand=_places_by_hand,
    ),
    "virtual stages stage by stage": Mutant(
        places=BLOCKS,
        fault=_stage_by_stage,
        family="qwen3",
        flags=(PP, "2", VPP, "1"),
        by_hand=_places_by_hand,
    ),
    "dualpipev comes back in the same order": Mutant(
        places=((layout, "_dualpipev_blocks"),),
        fault=_tails_in_order,
        family="qwen3",
        flags=(PP, "2", "--schedules-method", "dualpipev"),
        by_hand=_places_by_hand,
    ),
    "layer lists are read backwards": Mutant(
        places=BLOCKS,
        fault=_list_reversed,
        family="qwen3",
        flags=(PP, "2", LIST, "1,3"),
        by_hand=_places_by_hand,
    ),
    "dualpipev ends on the last stage": Mutant(
        places=PLACE,
        fault=_end_on_the_last_stage,
        family="qwen3",
        flags=(PP, "2", "--schedules-method", "dualpipev"),
    ),
    "whole experts go round by tensor rank": Mutant(
        places=((model, "expert_range"),),
        fault=_shares_by_tensor_rank,
        family=MOE,
        flags=(TP, "2", EP, "2", "--moe-tp-extend-ep"),
        by_hand=test_convert.test_whole_experts_spread_over_both_sizes,
    ),
    "all pairs of ranks have a file": Mutant(
        places=RANKS,
        fault=_all_pairs,
        family=MOE,
        flags=(TP, "2", EP, "2", ETP, "1"),
        by_hand=_pairs_by_hand,
    ),
    "MTP layers in reverse order": Mutant(
        places=((model.Model, "_mtp_place"),),
        fault=_mtp_reversed,
        family="deepseek3",
        flags=("--mtp-num-layers", "2"),
        # Upstream has no right output for two of them.
        reference=False,
        by_hand=test_convert.test_two_mtp_layers_keep_their_order,
        changes={"num_nextn_predict_layers": 2},
    ),
}


@pytest.fixture
def mutant(request: pytest.FixtureRequest) -> Mutant:
    return MUTANTS[request.param]


def plant(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fault in."""
    owner, attribute = mutant.places[0]
    faulty = mutant.fault(getattr(owner, attribute))
    for owner, attribute in mutant.places:
        monkeypatch.setattr(owner, attribute, faulty)


def of_kind(condition: Callable[[Mutant], bool]) -> pytest.MarkDecorator:
    """The mutants of which something holds."""
    return pytest.mark.parametrize("mutant", [name for name in MUTANTS if condition(MUTANTS[name])], indirect=True)


@of_kind(lambda mutant: True)
def test_a_conversion_does_not_see_it(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is another one, and both the default verification and the way back are content with it."""
    source = toys.toy(tmp_path / "hf", mutant.family, **mutant.changes)
    toys.run(source, tmp_path / "right", *mutant.flags)
    plant(mutant, monkeypatch)
    toys.run(source, tmp_path / "wrong", *mutant.flags)
    toys.run(tmp_path / "wrong", tmp_path / "back", of="mg", to="hf")
    test_convert.expect_same_hf(source, tmp_path / "back")
    with pytest.raises(AssertionError):
        test_convert.expect_same_mg(tmp_path / "right", tmp_path / "wrong")


@pytest.mark.real_data
@pytest.mark.skipif(not toys.REFERENCE.is_dir(), reason=f"no reference files at {toys.REFERENCE}")
@of_kind(lambda mutant: mutant.reference)
def test_reference_files_see_it(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = toys.reference(mutant.family)
    source = toys.save_hf(tmp_path / "hf", spec["hf_config"], toys.weights(spec))
    cases = [case for case in spec["cases"] if not case["suspect"]]
    plant(mutant, monkeypatch)
    with pytest.raises(AssertionError):
        for number, case in enumerate(cases):
            test_reference.expect_case(case, source, tmp_path / f"mg{number}")


@of_kind(lambda mutant: mutant.by_hand is not None)
def test_numbers_by_hand_see_it(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutant.by_hand is not None
    plant(mutant, monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        mutant.by_hand(tmp_path)
