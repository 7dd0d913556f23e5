"""Which layer stands on which pipeline stage under which local index, and which rank files exist.

Three numberings of layers occur:

    position    0 .. num_layers + noops - 1   all slots of the pipeline, empty ones (noop) included
    layer       the Hugging Face index        what names of the source say; a shortened model leaves some out
    local       0 ..                          inside one chunk of one stage, what Megatron's keys say

    PP 2, 6 positions, noop 0 and 5:     stage 0 [-, 0, 1]            stage 1 [2, 3, -]
    PP 2, 8 layers, VPP stage 2:         stage 0 [0, 1][4, 5]         stage 1 [2, 3][6, 7]
    PP 2, 8 layers, dualpipev:           stage 0 [0, 1][6, 7]         stage 1 [2, 3][4, 5]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_llm.errors import UserError

DUALPIPEV = "dualpipev"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How a Megatron checkpoint is split, and how its parameters are stored. `check_*` refuse what cannot be."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallel size inside an expert: 1 or `tp`. None is `tp`."""
    layers_per_virtual_stage: int | None = None
    num_layer_list: tuple[int, ...] | None = None
    noop_layers: tuple[int, ...] = ()
    schedules_method: str | None = None
    mtp_num_layers: int = 0
    moe_tp_extend_ep: bool = False
    """Experts are spread over EP x TP whole, instead of being cut by TP."""
    moe_grouped_gemm: bool = False
    mla_mm_split: bool = False
    transformer_impl: str = "local"
    padded_vocab_size: int | None = None
    """Rows of the embedding over all ranks; None: the vocabulary rounded up to a multiple of `tp`."""

    @property
    def expert_tp(self) -> int:
        """The number of ranks that one expert is cut over."""
        return 1 if self.moe_tp_extend_ep or self.etp == 1 else self.tp

    @property
    def expert_shares(self) -> int:
        """The number of equal shares that the experts of a layer are dealt out in."""
        return self.ep * self.tp if self.moe_tp_extend_ep else self.ep

    @property
    def is_virtual(self) -> bool:
        """Whether a rank file holds several models (`model0`, `model1`, ...) instead of one `model`."""
        return self.schedules_method == DUALPIPEV or self.layers_per_virtual_stage is not None


@dataclass(frozen=True, slots=True)
class Rank:
    """The coordinates of one rank file."""

    tp: int
    pp: int
    ep: int

    def folder(self, topology: Topology) -> str:
        """The folder of the file inside the folder of the iteration."""
        name = f"mp_rank_{self.tp:02d}"
        if topology.pp > 1:
            name += f"_{self.pp:03d}"
        return name + (f"_{self.ep:03d}" if topology.ep > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One model of one pipeline stage."""

    stage: int
    key: str
    """Its key in the rank file: `model`, or `model0`, `model1`, ... with virtual stages."""
    layers: list[tuple[int, int]] = field(default_factory=list)
    """(local index, Hugging Face index) of the layers that are no noop."""
    first: bool = False
    """Holds the embedding."""
    last: bool = False
    """Holds the final norm, the output layer and the MTP layers."""


def ranks(topology: Topology, stages: Sequence[int] | None = None) -> list[Rank]:
    """The rank files that exist, in order.

    With whole experts on each rank (expert TP 1) the experts' data-parallel groups run across the TP ranks, and only
    the (tp, ep) pairs occur that a rank has.
    """
    tp, ep = topology.tp, topology.ep
    if topology.etp == 1 and tp > 1:
        pairs = [(t, t % ep) for t in range(tp)] if tp % ep == 0 else [(e % tp, e) for e in range(ep)]
    else:
        pairs = [(t, e) for t in range(tp) for e in range(ep)]
    return [Rank(t, p, e) for p in (range(topology.pp) if stages is None else stages) for t, e in pairs]


def expert_range(topology: Topology, rank: Rank, num_experts: int) -> range:
    """The experts of a rank, by their index in the layer."""
    share = num_experts // topology.expert_shares
    index = rank.ep * topology.tp + rank.tp if topology.moe_tp_extend_ep else rank.ep
    return range(index * share, (index + 1) * share)


def hf_layers(total: int, dense: int, *, num_layers: int | None, first_k_dense: int | None) -> list[int]:
    """The Hugging Face layers that a model of `num_layers` layers with `first_k_dense` dense ones is made of.

    Args:
        total: layers of the source.
        dense: dense layers at the start of the source.

    Raises:
        UserError: more layers than there are.
    """
    dense = min(dense, total)
    keep = dense if first_k_dense is None else first_k_dense
    if keep > dense or keep < 0:
        raise UserError(
            f"--first-k-dense-replace {keep}: the source has {dense} dense layers at its start; "
            f"give a number from 0 to {dense}"
        )
    available = [*range(keep), *range(dense, total)]
    if num_layers is None:
        return available
    if not 0 < num_layers <= len(available):
        raise UserError(
            f"--num-layers {num_layers}: expected 1 to {len(available)}, the layers of the source without noop and MTP "
            "layers"
        )
    return available[:num_layers]


def place(topology: Topology, layers: Sequence[int]) -> list[Chunk]:
    """Deal `layers` (Hugging Face indices, in order) out to the chunks of all stages.

    Raises:
        UserError: the numbers do not fit; says which, and a `--num-layer-list` that would.
    """
    noops = set(topology.noop_layers)
    num_positions = len(layers) + len(noops)
    _check_noops(topology, num_positions)
    of_stages = blocks(topology, num_positions)
    remaining = iter(layers)
    at = [None if position in noops else next(remaining) for position in range(num_positions)]
    chunks = []
    for stage, of_stage in enumerate(of_stages):
        for index, block in enumerate(of_stage):
            found = [(local, at[position]) for local, position in enumerate(block)]
            chunks.append(
                Chunk(
                    stage=stage,
                    key=f"model{index}" if topology.is_virtual else "model",
                    layers=[(local, layer) for local, layer in found if layer is not None],
                    first=0 in block,
                    last=num_positions - 1 in block,
                )
            )
    return chunks


def blocks(topology: Topology, num_positions: int) -> list[list[range]]:
    """For each stage, the positions of each of its chunks.

    Raises:
        UserError: the numbers do not fit; says which, and a `--num-layer-list` that would.
    """
    pp, stage_list = topology.pp, topology.num_layer_list
    if stage_list is not None:
        _check_list(topology, stage_list, num_positions)
        starts = [sum(stage_list[:stage]) for stage in range(pp)]
        return [[range(start, start + count)] for start, count in zip(starts, stage_list, strict=True)]
    if num_positions < pp:
        raise UserError(
            f"--target-pipeline-parallel-size {pp}: the model has only {num_positions} layers; expected at most that "
            "many stages"
        )
    if num_positions % pp:
        raise UserError(
            f"--target-pipeline-parallel-size {pp} does not divide the {num_positions} layers"
            f"{_with_noops(topology)}; use --num-layer-list {suggested_list(num_positions, pp)}"
        )
    per_stage = num_positions // pp
    if topology.schedules_method == DUALPIPEV:
        return _dualpipev_blocks(topology, num_positions)
    depth = topology.layers_per_virtual_stage
    if depth is None:
        return [[range(stage * per_stage, (stage + 1) * per_stage)] for stage in range(pp)]
    if pp == 1:
        raise UserError(
            f"--num-layers-per-virtual-pipeline-stage {depth}: virtual stages need more than one pipeline stage; "
            "raise --target-pipeline-parallel-size or leave the flag out"
        )
    if depth < 1 or per_stage % depth or depth == per_stage:
        fitting = [d for d in range(1, per_stage) if per_stage % d == 0]
        raise UserError(
            f"--num-layers-per-virtual-pipeline-stage {depth}: each stage has {per_stage} layers; expected a smaller "
            f"number that divides it{f' ({fitting})' if fitting else '; there is none, leave the flag out'}"
        )
    virtual = per_stage // depth
    return [
        [range((v * pp + stage) * depth, (v * pp + stage + 1) * depth) for v in range(virtual)] for stage in range(pp)
    ]


def _dualpipev_blocks(topology: Topology, num_positions: int) -> list[list[range]]:
    pp, depth = topology.pp, num_positions // topology.pp // 2
    if pp == 1 or topology.layers_per_virtual_stage is not None:
        raise UserError(
            "--schedules-method dualpipev cuts each stage into two chunks by itself: it needs more than one pipeline "
            "stage and goes without --num-layers-per-virtual-pipeline-stage"
        )
    if num_positions % (2 * pp):
        raise UserError(
            f"--schedules-method dualpipev: {num_positions} layers{_with_noops(topology)} do not divide into 2 x {pp} "
            "chunks; choose another --target-pipeline-parallel-size or add --noop-layers"
        )
    heads = [range(stage * depth, (stage + 1) * depth) for stage in range(pp)]
    tails = [range(num_positions - head.stop, num_positions - head.start) for head in heads]
    return [[head, tail] for head, tail in zip(heads, tails, strict=True)]


def suggested_list(num_layers: int, pp: int) -> str:
    """A `--num-layer-list` for a number of layers that PP does not divide."""
    base, more = divmod(num_layers, pp)
    return ",".join(str(base + 1 if stage < more else base) for stage in range(pp))


def _with_noops(topology: Topology) -> str:
    return f" ({len(topology.noop_layers)} noop layers included)" if topology.noop_layers else ""


def _check_noops(topology: Topology, num_positions: int) -> None:
    noops = topology.noop_layers
    wrong = [index for index in noops if not 0 <= index < num_positions]
    if wrong:
        raise UserError(
            f"--noop-layers: {wrong[0]} is no position of a pipeline of {num_positions} layers, noop layers included; "
            f"expected 0 to {num_positions - 1}"
        )
    if len(set(noops)) != len(noops):
        raise UserError(f"--noop-layers {','.join(map(str, noops))}: an index occurs twice")


def _check_list(topology: Topology, stage_list: Sequence[int], num_positions: int) -> None:
    text = ",".join(map(str, stage_list))
    if topology.layers_per_virtual_stage is not None or topology.schedules_method is not None:
        raise UserError(
            f"--num-layer-list {text} goes without --num-layers-per-virtual-pipeline-stage and --schedules-method: "
            "leave one of them out"
        )
    if topology.noop_layers:
        raise UserError(
            f"--num-layer-list {text} goes without --noop-layers: uneven stages need no empty layers; leave one out"
        )
    if len(stage_list) != topology.pp:
        raise UserError(
            f"--num-layer-list {text} has {len(stage_list)} numbers; expected one for each of the {topology.pp} stages "
            "of --target-pipeline-parallel-size"
        )
    if sum(stage_list) != num_positions or min(stage_list) < 1:
        raise UserError(
            f"--num-layer-list {text}: expected numbers above 0 whose sum is the number of layers, {num_positions}; "
            f"for example {suggested_list(num_positions, topology.pp)}"
        )


def check_experts(topology: Topology, num_experts: int) -> None:
    """Refuse expert parallel sizes that do not fit the number of experts of a layer (0: a dense model).

    Raises:
        UserError: says which numbers disagree.
    """
    tp, ep, etp = topology.tp, topology.ep, topology.etp
    if etp not in (None, 1, tp):
        raise UserError(
            f"--expert-tensor-parallel-size {etp}: expected 1 (experts whole on each rank) or the value of "
            f"--target-tensor-parallel-size, {tp}"
        )
    if not num_experts:
        _check_dense(topology)
        return
    if topology.moe_tp_extend_ep and etp == 1 and tp > 1:
        raise UserError(
            "--moe-tp-extend-ep and --expert-tensor-parallel-size 1 are two ways to keep experts whole; leave one out"
        )
    if etp == 1 and tp % ep and ep % tp:
        raise UserError(
            f"--expert-tensor-parallel-size 1: one of --target-tensor-parallel-size {tp} and "
            f"--target-expert-parallel-size {ep} must divide the other"
        )
    shares = topology.expert_shares
    if num_experts % shares:
        by = f"{ep} x TP {tp} (--moe-tp-extend-ep)" if topology.moe_tp_extend_ep else str(ep)
        fitting = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        raise UserError(
            f"--target-expert-parallel-size {by} does not divide the {num_experts} experts of a layer; expected one of "
            f"{fitting}"
        )


def _check_dense(topology: Topology) -> None:
    wrong = {
        "--target-expert-parallel-size": topology.ep if topology.ep > 1 else None,
        "--moe-grouped-gemm": topology.moe_grouped_gemm or None,
        "--moe-tp-extend-ep": topology.moe_tp_extend_ep or None,
    }
    for flag, value in wrong.items():
        if value is not None:
            raise UserError(f"{flag} {'' if value is True else value}".rstrip() + ": the model has no experts")
