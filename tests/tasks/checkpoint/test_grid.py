"""A fixed sample of the grid; `bash scripts/soak.sh convert_grid` has all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import model
from mindspeed_llm.tasks.checkpoint.torch_file import read_torch_file
from tests.tasks.checkpoint import grid, grid_toys, toys
from tests.tasks.checkpoint.grid import Row

SEED, COUNT, REFUSED, PAIRS = 1, 60, 116, 29
ROWS = grid.sample(SEED, COUNT)


@pytest.fixture(scope="session")
def grid_toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a toy of the grid, made when it is first asked for; do not write to it."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = grid_toys.save(tmp_path_factory.mktemp("grid") / name, name)
        return made[name]

    return of


def name_of(row: Row) -> str:
    words = (re.sub(r"--|target-|-parallel|-size", "", word) for word in row.flags)
    return f"{row.toy} {' '.join(words)}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_there_and_back(row: Row, grid_toy: Callable[[str], Path], tmp_path: Path) -> None:
    """Hugging Face -> Megatron -> Hugging Face: the same names, shapes, dtypes and bits."""
    assert grid.check(row, grid_toy(row.toy), tmp_path) == "there and back"


def test_the_sample_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Every toy at least twice, and every value of everything that a row says at least three times."""
    with capsys.disabled():
        print(f" {len(ROWS)} rows, seed {SEED} ", end="")
    assert len(ROWS) == COUNT
    assert all(sum(row.toy == name for row in ROWS) >= 2 for name in grid_toys.NAMES)
    for name in (field.name for field in fields(Row)):
        values = [getattr(row, name) for row in ROWS]
        # What is a tuple counts as there or not.
        kinds = [bool(value) if isinstance(value, tuple) or name == "stage_list" else value for value in values]
        wanted = {True, False} if name in ("stage_list", "noops") else {*kinds, *_WANTED.get(name, ())}
        if name != "toy":
            assert all(kinds.count(value) >= 3 for value in wanted), (name, {v: kinds.count(v) for v in wanted})


_WANTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tp", "ep"), grid.SIZES),
    "pp": grid.STAGES,
    "mtp": (0, 1, 2),
    **dict.fromkeys(
        ("virtual", "whole_experts", "dualpipev", "te", "grouped", "mm_split", "extend", "with_config"), (False, True)
    ),
}


def test_refused_rows(grid_toy: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that the rules forbid are refused for that reason; which they are, the grid says by itself."""
    rows = grid.sample(SEED, REFUSED, refused=True)
    found = {grid.check(row, grid_toy(row.toy), tmp_path) for row in rows}
    with capsys.disabled():
        print(f" {len(rows)} rows, {len(found)} reasons, seed {SEED} ", end="")
    assert all(word.startswith("refused: ") for word in found) and len(found) >= 8, found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pair", grid.pairs(SEED, PAIRS), ids=lambda pair: " to ".join(name_of(row) for row in pair))
def test_resharding_equals_converting(pair: tuple[Row, Row], grid_toy: Callable[[str], Path], tmp_path: Path) -> None:
    """Megatron -> Megatron gives the files that the Hugging Face model gives, with the same arguments."""
    one, other = pair
    source = grid_toy(one.toy)
    family = ("--model-type-hf", grid_toys.toy_of(one.toy).family)
    toys.run(source, tmp_path / "one", *one.flags, *family)
    toys.run(source, tmp_path / "other", *other.flags, *family)
    config = ("--hf-cfg-dir", str(source)) if other.with_config else ()
    toys.run(tmp_path / "one", tmp_path / "moved", *other.flags, *config, of="mg")
    keys_of_config = json.loads((source / "config.json").read_text()).keys()
    files = [sorted(path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*.pt")) for name in ORDER]
    assert files[0] == files[1]
    for file in files[0]:
        # By torch itself.
        before, after = (torch.load(tmp_path / name / file, weights_only=False) for name in ORDER)
        said = vars(before.pop("args")), vars(after.pop("args"))
        # Without config.json its keys cannot be repeated; those that Megatron reads are there all the same.
        lost = said[0].keys() - said[1].keys()
        assert not lost if config else lost <= keys_of_config
        assert {name: said[0].get(name) for name in said[1]} == said[1]
        assert _content(before) == _content(after)


ORDER = ("other", "moved")


def _content(state: dict[str, Any]) -> Any:
    """What a rank file holds, in its order, with tensors as their dtype, shape and bytes."""
    return [
        (key, [(name, *toys.summary(value)) for name, value in held.items()] if isinstance(held, dict) else held)
        for key, held in state.items()
    ]


# What the grid would see


def test_a_wrong_refusal_is_seen(
    grid_toy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no")

    row = Row(toy="qwen3-moe", ep=2)
    with monkeypatch.context() as patched:
        patched.setattr(model, "check_experts", refuse)
        with pytest.raises(AssertionError, match="is refused, and should not be: no"):
            grid.check(row, grid_toy(row.toy), tmp_path)
        with pytest.raises(AssertionError, match="refused because of no, and should be because of one of"):
            grid.check(replace(row, virtual=True), grid_toy(row.toy), tmp_path)


def test_a_missing_refusal_is_seen(
    grid_toy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "check_experts", lambda *_: None)
    row = Row(toy="qwen3", ep=2)
    with pytest.raises(AssertionError, match=r"is not refused, and should be because of .*the model has no experts"):
        grid.check(row, grid_toy(row.toy), tmp_path)


def test_other_values_are_seen(
    grid_toy: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit, which flips between the way there and the way back."""
    row = Row(toy="qwen3-moe", ep=2)
    original = toys.run

    def run(load: Path, save: Path, *flags: str, **kinds: str) -> object:
        if kinds:
            file = next(load.glob("*/mp_rank_00_001/*.pt"))
            stored = read_torch_file(file)["model"]["decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"]
            with file.open("r+b") as stream:
                stream.seek(stored.offset)
                [byte] = stream.read(1)
                stream.seek(stored.offset)
                stream.write(bytes([byte ^ 1]))
        return original(load, save, *flags, **kinds)

    monkeypatch.setattr(toys, "run", run)
    with pytest.raises(AssertionError, match=r"model\.layers\.2\.mlp\.experts\.5\.gate_proj\.weight: other values"):
        grid.check(row, grid_toy(row.toy), tmp_path)


# The job


def test_the_job_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert grid.main(["--family", "qwen3", "--rows", "5", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert "5 of 108 rows, 1 toys, seed 1" in out and "5 of 5 rows, qwen3" in out
    found = re.search(r"5 rows: (\d+) bit-identical there and back, (\d+) refused .*, 0 failed", out)
    assert found and int(found[1]) + int(found[2]) == 5


def test_the_job_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One row that fails does not end the others, and ends the job with 1."""
    original, calls = grid.check, []

    def check(*args: Any) -> str:
        calls.append(args)
        assert len(calls) != 2, "another value"
        return original(*args)

    monkeypatch.setattr(grid, "check", check)
    assert grid.main(["--family", "qwen3", "--rows", "3"]) == 1
    out = capsys.readouterr().out
    assert len(calls) == 3 and "1 failed" in out
    assert re.search(r"FAILED qwen3: --target-tensor-parallel-size .*\n +AssertionError: another value", out)
    assert grid.main(["--family", "qwen4"]) == 2
    assert "qwen4: no such toy or family; expected one of HYV3, bailing_mini" in capsys.readouterr().err
