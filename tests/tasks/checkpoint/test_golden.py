"""Keys, shapes and values of families that have no reference file, against tables written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import boxes, families, model, rules
from tests.tasks.checkpoint import hf_toys, toys
from tests.tasks.checkpoint.golden import tables
from tests.tasks.checkpoint.test_reference import FAMILIES as WITH_REFERENCE
from tests.tasks.checkpoint.test_reference import _swapped


def test_every_family_has_a_reference_or_a_table() -> None:
    shown = [(hf_toys.TOYS | hf_toys.OTHERS)[name].family for name in tables.TABLES] + WITH_REFERENCE
    assert {families.by_id(name).ids for name in shown} == {family.ids for family in families.FAMILIES}


@pytest.mark.parametrize("name", tables.TABLES)
def test_keys_shapes_and_values(name: str, hf_toy: Callable[[str], Path], tmp_path: Path) -> None:
    has_experts = "{e}" in tables.TABLES[name]
    expect_table(hf_toy(name), name, tmp_path / "one")
    expect_table(hf_toy(name), name, tmp_path / "split", tp=2, pp=2, ep=2 if has_experts else 1)


@pytest.mark.parametrize("name", tables.MTP)
def test_mtp_layers(name: str, hf_toy: Callable[[str], Path], tmp_path: Path) -> None:
    expect_table(hf_toy(name), name, tmp_path / "one", mtp=True)
    expect_table(hf_toy(name), name, tmp_path / "split", tp=2, pp=2, ep=2, mtp=True)


def expect_table(
    source: Path, name: str, output: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, mtp: bool = False
) -> None:
    """Convert, and compare files, keys, shapes and values with what the table says."""
    sizes = {"tensor": tp, "pipeline": pp, "expert": ep}
    flags = [flag for kind, size in sizes.items() for flag in (f"--target-{kind}-parallel-size", str(size))]
    toys.run(source, output, *flags, "--mtp-num-layers", str(int(mtp)), "--verify", "none")
    expected = tables.checkpoint(name, toys.read_hf(source), tp=tp, pp=pp, ep=ep, mtp=mtp)
    found = toys.read_mg(output)
    assert len(found) == len(expected)
    for (t, p, e), tensors in expected.items():
        folder = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        rank = found[f"iter_0000001/{folder}/model_optim_rng.pt"]
        assert sorted(rank) == sorted(tensors), folder
        for key, value in tensors.items():
            assert rank[key].shape == value.shape and torch.equal(rank[key], value), (folder, key)


def test_grouped_experts_with_biases(hf_toy: Callable[[str], Path], tmp_path: Path) -> None:
    """Transformer Engine numbers them behind the name; local grouped experts have no place for biases."""
    source = hf_toy("gpt-oss")
    toys.run(source, tmp_path / "one")
    [sequential] = toys.read_mg(tmp_path / "one").values()
    toys.run(source, tmp_path / "te", "--moe-grouped-gemm", "--transformer-impl", "transformer_engine")
    [grouped] = toys.read_mg(tmp_path / "te").values()
    for expert in range(tables.EXPERTS):
        for layer in ("linear_fc1", "linear_fc2"):
            for kind in ("weight", "bias"):
                left = grouped[f"decoder.layers.2.mlp.experts.{layer}.{kind}{expert}"]
                right = sequential[f"decoder.layers.2.mlp.experts.local_experts.{expert}.{layer}.{kind}"]
                assert torch.equal(left, right)
    with pytest.raises(UserError, match="gpt-oss: --moe-grouped-gemm is not possible: its experts have biases"):
        toys.run(source, tmp_path / "grouped", "--moe-grouped-gemm")


def test_norms_with_biases_under_transformer_engine(hf_toy: Callable[[str], Path], tmp_path: Path) -> None:
    source = hf_toy("phi3.5-moe")
    toys.run(source, tmp_path / "mg", "--transformer-impl", "transformer_engine")
    [tensors] = toys.read_mg(tmp_path / "mg").values()
    for kind in ("weight", "bias"):
        key = f"decoder.layers.1.self_attention.linear_qkv.layer_norm_{kind}"
        assert torch.equal(tensors[key], toys.read_hf(source)[f"model.layers.1.input_layernorm.{kind}"])


# One deliberate fault for each kind of rule that the reference files do not show.


def _in_file_order(original):
    """Experts as they stand in the file, [in, out]."""

    def part(self, source, spot, expert):
        found = original(self, source, spot, expert)
        return replace(found, axes=tuple(sorted(found.axes)))

    return part


def _halves_of_heads_swapped(original):
    """Query heads in the order of other rotary positions: the second half of their values first."""

    def place(self, parts, share):
        placed = original(self, parts, share)
        query, half, pieces = parts[0], parts[0].shape[1] // 2, []
        for name, piece in placed.pieces:
            if name != query.name or len(pieces) > 2 * half:
                pieces.append((name, piece))
                continue
            for low, high in ((0, half), (half, 2 * half)):
                cut = piece.clip_mg((piece.mg_box[0], piece.mg_box[1], (low, high), *piece.mg_box[3:]))
                moved = ((low + half) % (2 * half), (low + half) % (2 * half) + half)
                box = (*cut.mg_box[:2], moved, *cut.mg_box[3:])
                pieces.append((name, boxes.Piece(cut.hf_box, box, cut.axes)))
        return replace(placed, pieces=tuple(pieces))

    return place


def _padding_first(original):
    """Padded rows at the start of the vocabulary; they would come back as tokens."""

    def place(self, parts, share):
        placed = original(self, parts, share)
        if placed.padding is None:
            return placed
        (start, stop), *rest = placed.padding
        width = stop - start
        pieces = tuple(
            (
                name,
                boxes.Piece(
                    piece.hf_box,
                    ((piece.mg_box[0][0] + width, piece.mg_box[0][1] + width), *piece.mg_box[1:]),
                    piece.axes,
                ),
            )
            for name, piece in placed.pieces
        )
        return replace(placed, pieces=pieces, padding=((0, width), *rest))

    return place


MUTANTS = {
    "query heads permuted as for other rotary positions": (
        rules.GroupedQkv,
        "place",
        _halves_of_heads_swapped,
        "mistral",
    ),
    "packed query, key and value: key and value swapped": (rules.GroupedQkv, "place", _swapped(1, 2), "bailing_mini"),
    "padded rows at the start": (rules.Vocabulary, "place", _padding_first, "internlm3"),
    "gate and up of experts that share a tensor swapped": (rules.Joined, "place", _swapped(0, 1), "gpt-oss"),
    "experts not transposed": (model.Model, "_part", _in_file_order, "gpt-oss"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_in_a_rule_shows(
    mutant: str, hf_toy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, fault, name = MUTANTS[mutant]
    monkeypatch.setattr(owner, attribute, fault(getattr(owner, attribute)))
    with pytest.raises(AssertionError):
        expect_table(hf_toy(name), name, tmp_path / "split", tp=2, pp=2, ep=2 if "{e}" in tables.TABLES[name] else 1)
