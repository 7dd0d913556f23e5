"""The grid of conversions: every toy, cut in every way, there and back bit for bit.

A row is one way to cut one toy. The cut itself (TP, PP, virtual stages, EP, expert TP) is a product, of which every
combination is a row. How parameters are stored, noop layers, padding and the like are drawn for each row by a seed, so
that another seed pairs them in other ways.

Which rows must be refused says `reasons`, from the rules of Megatron and of the families; it asks no converter.

    python -m tests.tasks.checkpoint.grid [--family NAME] [--rows N] [--seed N]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.prepare import prepare
from tests.tasks.checkpoint import grid_toys, toys

SIZES = (1, 2, 4)
STAGES = (1, 2, 3)
_REFUSED_STORAGE = 0.15
"""Of so many rows the storage may be one that the family does not have."""
_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to cut one toy."""

    toy: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    virtual: bool = False
    """Two or more virtual stages per stage."""
    whole_experts: bool = False
    """Expert tensor parallel size 1; else it is that of the rest."""
    stage_list: tuple[int, ...] | None = None
    noops: tuple[int, ...] = ()
    dualpipev: bool = False
    te: bool = False
    grouped: bool = False
    mm_split: bool = False
    extend: bool = False
    mtp: int = 0
    multiple: int | None = None
    padded: int | None = None
    with_config: bool = False
    """The way back is given config.json."""
    verify: str = "none"

    @property
    def positions(self) -> int:
        """Layers and noop layers."""
        return grid_toys.LAYERS + len(self.noops)

    @property
    def depth(self) -> int:
        """Layers of a virtual stage: two for each stage where that is a whole number."""
        return max(self.positions // self.pp // 2, 1) if not self.positions % (2 * self.pp) else 1

    @property
    def flags(self) -> list[str]:
        """The flags of the way there."""
        values = {
            "--target-tensor-parallel-size": self.tp,
            "--target-pipeline-parallel-size": self.pp,
            "--target-expert-parallel-size": self.ep,
            "--num-layers-per-virtual-pipeline-stage": self.depth if self.virtual else None,
            "--expert-tensor-parallel-size": 1 if self.whole_experts else None,
            "--num-layer-list": ",".join(map(str, self.stage_list)) if self.stage_list else None,
            "--noop-layers": ",".join(map(str, self.noops)) if self.noops else None,
            "--schedules-method": "dualpipev" if self.dualpipev else None,
            "--transformer-impl": "transformer_engine" if self.te else None,
            "--mtp-num-layers": self.mtp or None,
            "--make-vocab-size-divisible-by": self.multiple,
            "--padded-vocab-size": self.padded,
            "--verify": self.verify,
        }
        switches = {
            "--moe-grouped-gemm": self.grouped,
            "--mla-mm-split": self.mm_split,
            "--moe-tp-extend-ep": self.extend,
        }
        given = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
        return given + [flag for flag, on in switches.items() if on]


def rows(toy: str, seed: int) -> Iterator[Row]:
    """All cuts of a toy, each stored in a way that the seed draws."""
    for tp, pp, virtual, ep, whole in itertools.product(SIZES, STAGES, (False, True), SIZES, (False, True)):
        cut = Row(toy=toy, tp=tp, pp=pp, ep=ep, virtual=virtual, whole_experts=whole)
        chance = random.Random(f"{seed} {toy} {tp} {pp} {virtual} {ep} {whole}")
        of_cut = set(reasons(cut))
        row = _drawn(cut, chance)
        while set(reasons(row)) - of_cut and chance.random() > _REFUSED_STORAGE:
            row = _drawn(cut, chance)
        yield row


def _drawn(cut: Row, chance: random.Random) -> Row:
    config = grid_toys.toy_of(cut.toy).config
    experts, latent = grid_toys.num_experts(config), "kv_lora_rank" in config
    noops: tuple[int, ...] = ()
    stage_list = None
    if cut.pp == 3 and not cut.virtual and chance.random() < 0.7:
        stage_list = chance.choice(((2, 1, 1), (1, 2, 1), (1, 1, 2)))
    elif cut.pp == 3 or chance.random() < 0.3:
        count = 2 if cut.pp == 3 else chance.choice((2, 4))
        noops = tuple(sorted(chance.sample(range(grid_toys.LAYERS + count), count)))
    padding = chance.choice(("none", "multiple", "padded"))
    return replace(
        cut,
        stage_list=stage_list,
        noops=noops,
        dualpipev=cut.pp == 2 and not cut.virtual and chance.random() < 0.3,
        te=chance.random() < 0.4,
        grouped=chance.random() < (0.5 if experts else 0.03),
        mm_split=chance.random() < (0.5 if latent else 0.03),
        extend=chance.random() < (0.25 if experts else 0.03),
        mtp=chance.randint(0, grid_toys.mtp_layers(cut.toy)) if chance.random() > 0.03 else 3,
        multiple=chance.choice((3, 16, 128)) if padding == "multiple" else None,
        # Of 1024 rows the third and fourth of four ranks have none of the vocabulary.
        padded=chance.choice((512, 640, 1024)) if padding == "padded" else None,
        with_config=chance.random() < 0.5,
        verify=chance.choice(("none", "none", "sample", "full")),
    )


def reasons(row: Row) -> list[str]:
    """Why a row must be refused, each as a pattern that the message has to match if it names that reason; empty for a
    row that must convert.
    """
    config = grid_toys.toy_of(row.toy).config
    experts, latent = grid_toys.num_experts(config), "kv_lora_rank" in config
    found = []

    def refuse(when: bool, pattern: str) -> None:
        if when:
            found.append(pattern)

    # Tensor parallelism cuts between heads, KV groups and groups of a state space, and not at all where a family's
    # attention cannot be cut.
    refuse(config.get("num_attention_heads", row.tp) % row.tp > 0, "does not divide the .* attention heads")
    refuse(not latent and config.get("num_key_value_heads", row.tp) % row.tp > 0, "KV groups do not divide")
    refuse(config.get("n_groups", row.tp) % row.tp > 0, "do not divide over tensor parallel size")
    refuse(row.toy in ("qwen3-next", "minimax_m2") and row.tp > 1, r"--target-tensor-parallel-size \d is not possible")
    # Experts. With the tensor parallel ranks as expert parallel ones there are EP x TP shares.
    shares = row.ep * row.tp if row.extend else row.ep
    refuse(bool(experts) and experts % shares > 0, f"does not divide the {experts} experts")
    refuse(row.extend and row.whole_experts and row.tp > 1 and bool(experts), "two ways to keep experts whole")
    refuse(not experts and (row.ep > 1 or row.grouped or row.extend), "the model has no experts")
    # Pipeline.
    plain = row.stage_list is None and not row.virtual and not row.dualpipev
    refuse(plain and row.positions % row.pp > 0, "use --num-layer-list")
    refuse(row.stage_list is not None and row.virtual, "goes without --num-layers-per-virtual")
    refuse(row.stage_list is not None and bool(row.noops), "goes without --noop-layers")
    refuse(row.virtual and row.pp == 1, "virtual stages need more than one pipeline stage")
    # Virtual stages of `depth` layers: a whole number of them, and more than one, for each stage.
    if row.virtual and row.pp > 1 and row.stage_list is None:
        refuse(row.positions % row.pp > 0, "use --num-layer-list")
        per_stage = row.positions // row.pp
        refuse(per_stage % row.depth > 0 or per_stage == row.depth, "expected a smaller number")
    if row.dualpipev:
        refuse(row.pp == 1 or row.virtual, "needs more than one pipeline stage")
        refuse(row.positions % (2 * row.pp) > 0, "do not divide into 2 x")
    # Storage.
    refuse(row.mtp > grid_toys.mtp_layers(row.toy), "--mtp-num-layers")
    refuse(row.mtp > 0 and row.te, "goes without --mtp-num-layers")
    refuse(row.mm_split and not latent, "no multi-head latent attention")
    refuse(row.toy == "gpt-oss" and row.grouped and not row.te, "its experts have biases")
    refuse(row.toy in ("longcat", "mamba2") and row.te, "transformer_engine is not possible")
    # Vocabulary.
    refuse(row.padded is not None and row.padded % row.tp > 0, "--padded-vocab-size")
    return found


def check(row: Row, source: Path, folder: Path) -> str:
    """Convert there and back, or see that it is refused; returns what happened in a word.

    Raises:
        AssertionError: the source does not come back bit for bit, a row is refused that must convert, or is not refused
            or for another reason than it should be.
    """
    expected = reasons(row)
    family = ("--model-type-hf", grid_toys.toy_of(row.toy).family)
    between, back = folder / "mg", folder / "hf"
    if expected:
        try:
            prepare(toys.request(source, between, *row.flags, *family))
        except UserError as error:
            match = next((pattern for pattern in expected if re.search(pattern, str(error))), None)
            assert match, f"refused because of {error}, and should be because of one of {expected}"
            return f"refused: {match}"
        raise AssertionError(f"is not refused, and should be because of {expected}")
    try:
        toys.run(source, between, *row.flags, *family)
        config = ("--hf-cfg-dir", str(source)) if row.with_config else ()
        toys.run(between, back, "--verify", row.verify, *config, of="mg", to="hf")
    except UserError as error:
        raise AssertionError(f"is refused, and should not be: {error}") from error
    expect_same(row, source, back)
    return "there and back"


def expect_same(row: Row, source: Path, back: Path) -> None:
    """Same names, shapes, dtypes and bits, but for MTP layers that were not asked for."""
    left_out = tuple(grid_toys.mtp_prefix(row.toy, mtp) for mtp in range(row.mtp, grid_toys.mtp_layers(row.toy)))
    before, after = grid_toys.read(source), grid_toys.read(back)
    wanted = {name for name in before if not name.startswith(left_out)}
    assert wanted == after.keys(), f"names that differ: {sorted(wanted ^ after.keys())[:5]}"
    for name in wanted:
        one, other = before[name], after[name]
        assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{name}: {one.dtype} {one.shape}, {other.dtype}"
        assert torch.equal(bits(one), bits(other)), f"{name}: other values"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes: equal numbers need not be equal bits."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def sample(seed: int, count: int, *, refused: bool = False) -> list[Row]:
    """So many rows, drawn, equally many of each toy; of those that convert, or of those that are refused."""
    chance = random.Random(seed)
    names = list(grid_toys.NAMES)
    chance.shuffle(names)
    chosen = []
    for number, toy in enumerate(names):
        possible = [row for row in rows(toy, seed) if bool(reasons(row)) == refused]
        chosen += chance.sample(possible, count // len(names) + (number < count % len(names)))
    return sorted(chosen, key=lambda row: grid_toys.NAMES.index(row.toy))


def pairs(seed: int, count: int) -> list[tuple[Row, Row]]:
    """So many pairs of different cuts of one toy, the second of which can be made from the first."""
    chance = random.Random(seed)
    chosen: list[tuple[Row, Row]] = []
    while len(chosen) < count:
        toy = grid_toys.NAMES[len(chosen) % len(grid_toys.NAMES)]
        possible = [row for row in rows(toy, seed) if not reasons(row)]
        one, other = chance.sample(possible, 2)
        if one.mtp >= other.mtp and (one.tp, one.pp, one.ep) != (other.tp, other.pp, other.ep):
            chosen.append((one, other))
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid, or a part of it, and print what came of it; the exit code is 1 where a row failed."""
    parser = argparse.ArgumentParser(prog="convert_grid", description="Convert every toy in every way, and back.")
    parser.add_argument("--family", help="one toy, or all toys of one family (a value of --model-type-hf)")
    parser.add_argument("--rows", type=int, help="only so many rows, drawn by the seed; default: all")
    parser.add_argument("--seed", type=int, default=0, help="what the rest of each row is drawn by (default: 0)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = [name for name in grid_toys.NAMES if options.family in (None, name, grid_toys.toy_of(name).family)]
    if not names:
        known = sorted({*grid_toys.NAMES, *(grid_toys.toy_of(name).family for name in grid_toys.NAMES)})
        print(f"--family {options.family}: no such toy or family; expected one of {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = [row for name in names for row in rows(name, options.seed)]
    total = len(chosen)
    if options.rows is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.rows, total))
        chosen.sort(key=lambda row: names.index(row.toy))
    print(f"{len(chosen)} of {total} rows, {len(names)} toys, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="convert_grid_") as folder:
        return _run(chosen, Path(folder))


def _run(chosen: Sequence[Row], folder: Path) -> int:
    outcomes: Counter[str] = Counter()
    sources: dict[str, Path] = {}
    failures: list[str] = []
    started = shown = time.monotonic()
    for number, row in enumerate(chosen, 1):
        if row.toy not in sources:
            sources[row.toy] = grid_toys.save(folder / "toys" / row.toy, row.toy)
        try:
            outcomes[check(row, sources[row.toy], folder / "row")] += 1
        except Exception as error:  # whatever a conversion raises is a failure of its row, and the others go on
            failures.append(f"{row.toy}: {' '.join(row.flags)}\n    {type(error).__name__}: {error}")
            print(f"FAILED {failures[-1]}", flush=True)
        shutil.rmtree(folder / "row", ignore_errors=True)
        now = time.monotonic()
        if now - shown > _EVERY_S or number == len(chosen):
            shown = now
            print(
                f"{number} of {len(chosen)} rows, {row.toy}, {outcomes['there and back']} there and back, "
                f"{len(failures)} failed, {now - started:.0f} s, "
                f"{(now - started) / number * (len(chosen) - number):.0f} s left",
                flush=True,
            )
    refused = {word: count for word, count in outcomes.items() if word.startswith("refused")}
    print(json.dumps({"rows": len(chosen), "there and back": outcomes["there and back"]}))
    for word, count in sorted(refused.items(), key=lambda pair: -pair[1]):
        print(f"{count:6} {word}")
    print(f"{len(chosen)} rows: {outcomes['there and back']} bit-identical there and back, ", end="")
    print(f"{sum(refused.values())} refused for the reason that they should be, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
