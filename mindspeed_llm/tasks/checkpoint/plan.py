"""A conversion as data, before any value is read: every file with its tensors, every source tensor accounted for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.boxes import Box, Piece, gap, identity, whole
from mindspeed_llm.tasks.checkpoint.layout import Rank, ranks
from mindspeed_llm.tasks.checkpoint.mg_reader import RANK_FILE
from mindspeed_llm.tasks.checkpoint.model import MgTensor, Model
from mindspeed_llm.tasks.checkpoint.safetensors_file import plan_shards
from mindspeed_llm.tasks.checkpoint.sources import Source
from mindspeed_llm.tasks.checkpoint.tables import Entry


@dataclass(frozen=True, kw_only=True)
class Target:
    """A tensor that will be written, and the parts of Hugging Face tensors that it is made of."""

    key: str
    """Its name in the file; `model/...` in rank files."""
    shape: tuple[int, ...]
    view: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[str, Piece], ...]
    padding: Box | None = None

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True, kw_only=True)
class TargetFile:
    """A file that will be written, by its path in the output folder."""

    path: str
    targets: list[Target]
    rank: Rank | None = None

    @property
    def nbytes(self) -> int:
        """The size of its tensors."""
        return sum(target.nbytes for target in self.targets)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a conversion writes, and what becomes of each source tensor."""

    files: list[TargetFile]
    taken: set[str] = field(default_factory=set)
    """Source tensors that are taken, each of them in full."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Source tensors that are not taken -> reason."""

    @property
    def nbytes(self) -> int:
        """The size of all tensors that will be written."""
        return sum(file.nbytes for file in self.files)


def rank_targets(
    model: Model,
    rank: Rank,
    source: Source,
    params_dtype: torch.dtype | None = None,
    *,
    only: Callable[[Entry], bool] | None = None,
) -> Iterator[tuple[MgTensor, Target]]:
    """The tensors of one rank as a training job or a rank file needs them; `only` leaves out entries of the table.

    Raises:
        UserError: a source tensor is missing, or the parts of one tensor differ in dtype.
    """
    available = source.names()
    for tensor in model.rank_tensors(rank, only=only):
        for name in tensor.names:
            if name not in available:
                raise UserError(
                    f"the source has no tensor {name}, which {tensor.key} is made of; check that config.json belongs "
                    "to these weights and that all of their files are there"
                )
        lacking = gap([piece.mg_box for _, piece in tensor.pieces] + _boxes(tensor.padding), tensor.view)
        assert lacking is None, f"{tensor.key}: the rule fills {lacking}"
        yield (
            tensor,
            Target(
                key=f"{tensor.chunk}/{tensor.key}",
                shape=tensor.shape,
                view=tensor.view,
                dtype=_dtype(tensor, source, params_dtype),
                pieces=tensor.pieces,
                padding=tensor.padding,
            ),
        )


def plan_mg(model: Model, source: Source, *, iteration: str, params_dtype: torch.dtype | None = None) -> Plan:
    """The plan that writes a Megatron checkpoint under `model.topology`.

    Raises:
        UserError: as `rank_targets`; a source tensor that has no place in the model.
    """
    files = []
    used: dict[str, set[Box]] = defaultdict(set)
    of_first: dict[tuple[int, int], list[tuple[MgTensor, Target]]] = {}
    for rank in ranks(model.topology):
        # Ranks that differ in expert parallelism only have all but their experts in common.
        known = of_first.setdefault((rank.tp, rank.pp), [])
        found = rank_targets(model, rank, source, params_dtype, only=_is_expert if known else None)
        if known:
            targets = [next(found)[1] if tensor.is_expert else target for tensor, target in known]
        else:
            known += found
            targets = [target for _, target in known]
        for target in targets:
            for name, piece in target.pieces:
                used[name].add(piece.hf_box)
        files.append(
            TargetFile(path=f"{iteration}/{rank.folder(model.topology)}/{RANK_FILE}", targets=targets, rank=rank)
        )
    dropped = _account(model, source, used)
    return Plan(files=files, taken=set(used), dropped=dropped)


def _is_expert(item: Entry) -> bool:
    return item.is_expert


def plan_hf(model: Model, source: Source, *, shard_size: int, params_dtype: torch.dtype | None = None) -> Plan:
    """The plan that writes a Hugging Face directory.

    Raises:
        UserError: the source lacks a tensor.
    """
    targets = {}
    available = source.names()
    for name, tensor in model.hf_tensors().items():
        if name not in available:
            raise UserError(f"the source has nothing to fill {name}; check --model-type-hf and --hf-cfg-dir")
        targets[name] = Target(
            key=name,
            shape=tensor.shape,
            view=tensor.view,
            dtype=_wanted(params_dtype, tensor.keep_dtype, {source.dtype(name)}) or source.dtype(name),
            pieces=((name, identity(tensor.view)),),
        )
    shards = plan_shards({name: target.nbytes for name, target in targets.items()}, shard_size)
    files = [TargetFile(path=file, targets=[targets[name] for name in names]) for file, names in shards.files]
    dropped = _account(model, source, {name: {whole(target.view)} for name, target in targets.items()})
    return Plan(files=files, taken=set(targets), dropped=dropped)


def _dtype(tensor: MgTensor, source: Source, wanted: torch.dtype | None) -> torch.dtype:
    # Of its tensors, not of its pieces: a share of the vocabulary that is all padding has none.
    found = {source.dtype(name): name for name in tensor.names}
    if (dtype := _wanted(wanted, tensor.keep_dtype, set(found))) is not None:
        return dtype
    if len(found) > 1:
        names = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in found.items())
        raise UserError(f"{tensor.key} is one tensor made of several dtypes: {names}; give --params-dtype")
    return next(iter(found))


def _wanted(dtype: torch.dtype | None, keep: bool, found: set[torch.dtype]) -> torch.dtype | None:
    """The dtype to change to; None where the tensor stays as it is."""
    return dtype if not keep and all(each.is_floating_point for each in found) else None


def _account(model: Model, source: Source, used: Mapping[str, set[Box]]) -> dict[str, str]:
    """Why source tensors are not taken. Those that are, are taken in full.

    Raises:
        UserError: there is no reason.
    """
    expected = model.hf_tensors()
    dropped, unexplained = {}, []
    for name in sorted(source.names()):
        if name in used:
            lacking = gap(used[name], expected[name].view)
            assert lacking is None, f"{name}: the rules take {lacking}"
            continue
        reason = model.why_absent(name)
        if reason is None:
            unexplained.append(name)
        else:
            dropped[name] = reason
    if unexplained:
        raise UserError(
            f"{len(unexplained)} source tensors have no place in a {model.family.ids[0]} model: "
            f"{', '.join(unexplained[:5])}{', ...' if len(unexplained) > 5 else ''}; check --model-type-hf and "
            "config.json"
        )
    return dropped


def _boxes(padding: Box | None) -> list[Box]:
    return [] if padding is None else [padding]
