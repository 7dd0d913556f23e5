"""Reads the tables, and makes what they say of Hugging Face tensors, in a way of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tests.tasks.checkpoint.golden import dense, latent, mixtures

TABLES = dense.TABLES | latent.TABLES | mixtures.TABLES
EXPERTS, LAYERS, GROUPS = 8, 4, 2
MTP_LAYER = 4
# Whose MTP layer stands behind which table; it is like a layer of the model.
MTP = {
    "deepseek32": (latent.MTP_AROUND, 3, "model.layers.4.embed_tokens.weight"),
    "glm5": (latent.MTP_AROUND, 2, "model.embed_tokens.weight"),
    "HYV3": (mixtures.MTP_AROUND, 3, "model.embed_tokens.weight"),
    "bailing_mini": (mixtures.MTP_AROUND, 3, "model.word_embeddings.weight"),
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a table."""

    section: str
    """first, last, or the numbers of layers."""
    key: str
    shape: tuple[int, ...]
    how: str
    sources: tuple[str, ...]


def lines(table: str) -> Iterator[Line]:
    """The lines of a table."""
    section = ""
    for text in filter(None, table.split("\n")):
        if text.startswith("["):
            section = text.strip("[]")
            continue
        key, shape, how, *sources = text.split()
        yield Line(
            section=section,
            key=key,
            shape=tuple(int(size) for size in shape.split("x")),
            how=how,
            sources=tuple(name for source in sources for name in _expanded(source)),
        )


def _expanded(source: str) -> list[str]:
    found = re.search(r"\{([^}]*,[^}]*)\}", source)
    return [source.replace(found[0], each) for each in found[1].split(",")] if found else [source]


def checkpoint(
    name: str, hf: Mapping[str, torch.Tensor], *, tp: int, pp: int, ep: int, mtp: bool = False
) -> dict[tuple[int, int, int], dict[str, torch.Tensor]]:
    """(tp, pp, ep) -> the tensors of this rank; shapes with one rank are checked against the table on the way."""
    ranks = [(t, p, e) for t in range(tp) for p in range(pp) for e in range(ep)]
    return {(t, p, e): dict(_rank(name, hf, (t, tp), (p, pp), (e, ep), mtp)) for t, p, e in ranks}


def _rank(
    name: str,
    hf: Mapping[str, torch.Tensor],
    tp: tuple[int, int],
    pp: tuple[int, int],
    ep: tuple[int, int],
    mtp: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    stage, stages = pp
    per_stage = LAYERS // stages
    is_last = stage == stages - 1
    table = list(lines(TABLES[name]))
    for line in table:
        if line.section in ("first", "last"):
            if (stage == 0) if line.section == "first" else is_last:
                key = line.key.replace("decoder.final", "final") if mtp else line.key
                yield key, _made(line, hf, "", tp)
            if line.section == "first" and is_last and stages > 1:
                if name in dense.TIED:
                    yield "output_layer.weight", _made(line, hf, "", tp)
                if mtp:
                    yield line.key, _cut(line, [hf[MTP[name][2]]], tp)
            continue
        for layer in map(int, line.section.split()):
            if layer // per_stage == stage:
                yield from _of_layer(line, hf, f"decoder.layers.{layer % per_stage}.", f"model.layers.{layer}.", tp, ep)
    if mtp and is_last:
        around, like, _ = MTP[name]
        for line in lines("[last]" + around):
            yield line.key, _made(line, hf, "", tp)
        for line in table:
            if str(like) in line.section.split():
                yield from _of_layer(line, hf, "mtp.layers.0.transformer_layer.", f"model.layers.{MTP_LAYER}.", tp, ep)


def _of_layer(
    line: Line, hf: Mapping[str, torch.Tensor], mg_prefix: str, hf_prefix: str, tp: tuple[int, int], ep: tuple[int, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    if "{e}" not in line.key:
        yield mg_prefix + line.key, _made(line, hf, hf_prefix, tp)
        return
    mine = EXPERTS // ep[1]
    for local in range(mine):
        value = _made(line, hf, hf_prefix, tp, expert=ep[0] * mine + local)
        yield mg_prefix + line.key.replace("{e}", str(local)), value


def _made(
    line: Line, hf: Mapping[str, torch.Tensor], prefix: str, tp: tuple[int, int], expert: int | None = None
) -> torch.Tensor:
    parts = [hf[prefix + name.replace("{e}", str(expert))] for name in line.sources]
    if line.how in ("turns", "turned", "each"):
        parts = [part[expert] for part in parts]
    assert tuple(_cut(line, parts, (0, 1)).shape) == line.shape, f"{line.key}: the table itself is wrong"
    return _cut(line, parts, tp)


def _cut(line: Line, parts: list[torch.Tensor], tp: tuple[int, int]) -> torch.Tensor:
    """The share of one tensor parallel rank."""
    rank, size = tp
    if line.how == "turns":
        parts = [part.movedim(-1, 0)[start::2] for part in parts for start in (0, 1)]
    elif line.how == "halves":
        parts = list(parts[0].chunk(2))
    elif line.how == "packed":
        heads = parts[0].shape[0] // 10  # six query heads, two key heads, two value heads
        parts = list(parts[0].split([6 * heads, 2 * heads, 2 * heads]))
    if line.how in ("copy", "stack", "each"):
        return torch.cat(parts)
    if line.how == "vocab":
        rows = torch.cat([parts[0], torch.zeros(-len(parts[0]) % size, *parts[0].shape[1:])])
        return rows.chunk(size)[rank]
    if line.how in ("columns", "turned"):
        return (parts[0].T if line.how == "turned" else parts[0]).chunk(size, dim=1)[rank]
    if line.how in ("qkv", "packed"):
        groups = zip(*(part.chunk(GROUPS) for part in parts), strict=True)
        return torch.cat([torch.cat(group) for group in groups]).chunk(size)[rank]
    assert line.how in ("rows", "halves", "turns"), line.how
    return torch.cat([part.chunk(size)[rank] for part in parts])
