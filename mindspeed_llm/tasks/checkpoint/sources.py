"""Where values come from: both sides of a conversion as Hugging Face tensors that are read by parts.

The plan asks for a box of a Hugging Face tensor. A Hugging Face directory answers with one view; a Megatron checkpoint
with as many as the box has parts in its files. So hf -> mg, mg -> hf and mg -> mg are one and the same loop, and what
changes values on the way (dequantisation, merged adapters) is a source that wraps another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.boxes import Box, Piece, gap, intersect, take
from mindspeed_llm.tasks.checkpoint.hf_reader import StoredHf
from mindspeed_llm.tasks.checkpoint.layout import Rank, ranks
from mindspeed_llm.tasks.checkpoint.mg_reader import RANK_FILE, MgDirectory, RankTensor
from mindspeed_llm.tasks.checkpoint.model import HfTensor, MgTensor, Model
from mindspeed_llm.tasks.checkpoint.replicas import Replica


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A part of a Hugging Face tensor: where it stands in the tensor's view, and which tensor of which file has it."""

    box: Box
    file: str
    key: str
    shape: tuple[int, ...]
    """Of the tensor that has it."""
    stored_as: str = ""
    """How its values are stored, where they are not there as they are."""


class Source(Protocol):
    """The tensors of a model under their Hugging Face names.

    The value of an element does not depend on the box that it is read with: verification reads other boxes.
    """

    def names(self) -> set[str]:
        """The tensors that can be read."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Parts of the tensor's view that make up `box`, each with its own box; views of the files, where possible.

        Values that are computed may have a wider dtype than the tensor: whoever puts them into place rounds them.
        """

    def fragments(self, name: str, box: Box) -> Iterator[Fragment]:
        """Where the parts that `read` gives come from."""


class HfSource:
    """A Hugging Face directory.

    Raises:
        UserError: a tensor has another shape than config.json says.
    """

    def __init__(self, stored: Mapping[str, StoredHf], expected: Mapping[str, HfTensor]) -> None:
        self._stored, self._expected = stored, expected
        for name, tensor in expected.items():
            if name in stored and stored[name].shape != tensor.shape:
                raise UserError(
                    f"{stored[name].file}: {name} has shape {list(stored[name].shape)}, but config.json says "
                    f"{list(tensor.shape)}; check that they belong together"
                )

    def names(self) -> set[str]:
        """See `Source`."""
        return set(self._stored)

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return self._stored[name].dtype

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `Source`."""
        yield box, take(self._stored[name].view().view(self._expected[name].view), box)

    def fragments(self, name: str, box: Box) -> Iterator[Fragment]:
        """See `Source`."""
        stored = self._stored[name]
        yield Fragment(box=box, file=stored.file.name, key=name, shape=stored.shape)


@dataclass(frozen=True, slots=True)
class _Located:
    piece: Piece
    tensor: RankTensor
    view: tuple[int, ...]
    file: str
    key: str


class MgSource:
    """A Megatron checkpoint.

    Args:
        mixed: whether the ranks may differ in the dtype of a tensor, since all will be written in one.

    Raises:
        UserError: a tensor that the model should have is missing or has another shape, or one that it should not have
            is there; ranks differ in the dtype of one; names file and key.
    """

    def __init__(self, directory: MgDirectory, model: Model, *, mixed: bool = False) -> None:
        self._folder = directory.folder
        self._at: dict[str, list[_Located]] = {}
        self._replicas: list[tuple[str, _Located, _Located]] = []
        found: dict[str, dict[Box, _Located]] = {}
        first_of: dict[str, _Located] = {}
        for rank in ranks(model.topology):
            for tensor, stored, file in _rank_tensors(directory, model, rank):
                for name, piece in tensor.pieces:
                    located = _Located(piece, stored, tensor.view, file, f"{tensor.chunk}/{tensor.key}")
                    # Replicas hold the same values: the first one serves.
                    first = found.setdefault(name, {}).setdefault(piece.hf_box, located)
                    if first is not located:
                        self._replicas.append((name, first, located))
                    known = first_of.setdefault(name, located)
                    if known.tensor.dtype != stored.dtype and (tensor.keep_dtype or not mixed):
                        raise UserError(_several_dtypes(directory, name, known, located, tensor.keep_dtype))
        expected = model.hf_tensors()
        for name, located in found.items():
            if (lacking := gap(located, expected[name].view)) is not None:
                raise AssertionError(f"{name} cannot be put together from the checkpoint: {lacking}")
            self._at[name] = list(located.values())

    def names(self) -> set[str]:
        """See `Source`."""
        return set(self._at)

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return self._at[name][0].tensor.dtype

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `Source`."""
        for located in self._at[name]:
            shared = intersect(located.piece.hf_box, box)
            if shared is not None:
                mg_box = located.piece.to_mg(shared)
                yield shared, located.piece.as_hf(take(located.tensor.view().view(located.view), mg_box))

    def replicas(self) -> list[Replica]:
        """What other ranks hold of the tensors, too, and what is read of them."""

        def values(located: _Located) -> torch.Tensor:
            return located.piece.as_hf(take(located.tensor.view().view(located.view), located.piece.mg_box))

        def where(located: _Located) -> str:
            return f"{self._folder / located.file / RANK_FILE}: {located.key}"

        return [
            Replica(
                name=name,
                first=where(first),
                other=where(other),
                views=lambda first=first, other=other: (values(first), values(other)),
            )
            for name, first, other in self._replicas
        ]

    def fragments(self, name: str, box: Box) -> Iterator[Fragment]:
        """See `Source`."""
        for located in self._at[name]:
            shared = intersect(located.piece.hf_box, box)
            if shared is not None:
                yield Fragment(box=shared, file=located.file, key=located.key, shape=located.tensor.shape)


def _several_dtypes(directory: MgDirectory, name: str, one: _Located, other: _Located, kept: bool) -> str:
    def words(located: _Located) -> str:
        return f"{located.file}/{located.key} is {str(located.tensor.dtype).removeprefix('torch.')}"

    return f"{directory.folder}: {name} is one tensor made of several dtypes: {words(one)}, {words(other)}; " + (
        "are the files of one checkpoint? Copy them again" if kept else "give --params-dtype, or copy them again"
    )


def _rank_tensors(directory: MgDirectory, model: Model, rank: Rank) -> Iterator[tuple[MgTensor, RankTensor, str]]:
    """The tensors of a rank with their places in its file, which must hold just them."""
    file = directory.file(rank, model.topology)
    left = {(chunk, key) for chunk, tensors in file.models.items() for key in tensors}
    for tensor in model.rank_tensors(rank):
        stored = file.models.get(tensor.chunk, {}).get(tensor.key)
        if stored is None:
            raise UserError(
                f"{file.path}: {tensor.chunk} has no {tensor.key}, which a {model.family.ids[0]} model split like this "
                "has; check --model-type-hf, and the flags that override the topology that the checkpoint says"
            )
        if stored.shape != tensor.shape:
            raise UserError(
                f"{file.path}: {tensor.chunk}/{tensor.key} has shape {list(stored.shape)}, expected "
                f"{list(tensor.shape)} from the model's settings; check --hf-cfg-dir and --model-type-hf"
            )
        left.discard((tensor.chunk, tensor.key))
        yield tensor, stored, file.path.parent.name
    if left:
        chunk, key = min(left)
        raise UserError(
            f"{file.path}: {chunk}/{key} and {len(left) - 1} more tensors belong to nothing that a "
            f"{model.family.ids[0]} model split like this has; check --model-type-hf, and the flags that override the "
            "topology that the checkpoint says"
        )


class WithCopies:
    """A source that also answers for copies: Hugging Face tensors that repeat another one and are not stored."""

    def __init__(self, source: Source, copies: Mapping[str, str]) -> None:
        self._source = source
        stored = source.names()
        self._real = {name: name for name in stored}
        for name in copies:
            real = name
            while real not in stored and real in copies:
                real = copies[real]
            if real in stored:
                self._real[name] = real

    def names(self) -> set[str]:
        """See `Source`."""
        return set(self._real)

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return self._source.dtype(self._real[name])

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `Source`."""
        return self._source.read(self._real[name], box)

    def fragments(self, name: str, box: Box) -> Iterator[Fragment]:
        """See `Source`."""
        return self._source.fragments(self._real[name], box)


class Renamed:
    """A source whose tensors have other names there: `names` gives for each name here the one there."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        there = source.names()
        self._source = source
        self._there = {name: other for name, other in names.items() if other in there}

    def names(self) -> set[str]:
        """See `Source`."""
        return set(self._there)

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return self._source.dtype(self._there[name])

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `Source`."""
        return self._source.read(self._there[name], box)

    def fragments(self, name: str, box: Box) -> Iterator[Fragment]:
        """See `Source`."""
        return self._source.fragments(self._there[name], box)
