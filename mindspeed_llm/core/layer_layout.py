"""Which layer of the model stands where in the pipeline: uneven stages, layers that do nothing, virtual stages.

    position    0 .. --num-layers - 1    all slots of the pipeline, those of noop layers included
    layer       0 ..                     the layers of the model, as its weights count them

The functions take the flat arguments of a run (Megatron's names), after `training.arguments.validate`, and need no
torch. The arithmetic is the one of the weight converter (`tasks.checkpoint.layout`), so that keys of checkpoints agree.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, TypeVar

from mindspeed_llm.tasks.checkpoint.layout import Chunk, Topology, blocks, place

T = TypeVar("T")


def noop_layers(args: Namespace) -> tuple[int, ...]:
    """The positions of layers that do nothing."""
    return tuple(args.noop_layers or ())


def num_real_layers(args: Namespace) -> int:
    """The number of layers that compute something: what FLOPs, depths and losses per layer are counted with."""
    return args.num_layers - len(noop_layers(args))


def layers_at(args: Namespace) -> list[int | None]:
    """The layer at each position; None at those of noop layers."""
    noops = set(noop_layers(args))
    layers = iter(range(args.num_layers))
    return [None if position in noops else next(layers) for position in range(args.num_layers)]


def at_positions(values: Sequence[T], args: Namespace, *, noop: T) -> list[T]:
    """Values of the layers, in order, set to the layers' positions; `noop` where there is none."""
    assert len(values) == num_real_layers(args), f"{len(values)} values for {num_real_layers(args)} layers"
    return [noop if layer is None else values[layer] for layer in layers_at(args)]


def layer_positions(args: Namespace) -> list[list[range]]:
    """For each pipeline stage, the positions of each of its chunks (virtual stages; one without them)."""
    return blocks(_pipeline(args), args.num_layers)


def chunks(args: Namespace) -> list[Chunk]:
    """Every chunk of every stage with the (local index, layer) pairs of its layers, noop layers left out."""
    return place(_pipeline(args), range(num_real_layers(args)))


def moe_pattern(args: Namespace) -> list[int]:
    """1 for each position whose layer has experts, else 0: megatron-core's `moe_layer_freq`, by whose ones it averages
    the losses of experts.

    A layer has experts from layer `--first-k-dense-replace` on where `--moe-layer-freq` divides its number; -1 leaves a
    condition out. Both count layers, not positions: noop layers before them shift nothing. A `--moe-layer-freq` that is
    a list says it for each position.
    """
    frequency, dense = args.moe_layer_freq, args.first_k_dense_replace
    if isinstance(frequency, tuple):
        return [int(bool(bit) and layer is not None) for bit, layer in zip(frequency, layers_at(args), strict=True)]
    first, step = max(dense or 0, 0), abs(frequency)
    return at_positions([int(n >= first and n % step == 0) for n in range(num_real_layers(args))], args, noop=0)


def pipeline_layout(args: Namespace) -> str | None:
    """`--num-layer-list` as megatron-core's `pipeline_model_parallel_layout`: one letter for each layer, E for the
    embedding, L for the loss, stages with bars between them (`Ett|tttL`). None: stages are even.
    """
    if args.num_layer_list is None:
        return None
    stages = ["t" * sum(map(len, stage)) for stage in layer_positions(args)]
    return "E" + "|".join(stages) + "L"


def config_fields(args: Namespace) -> dict[str, Any]:
    """The fields of megatron-core's `TransformerConfig` that follow from where layers stand."""
    fields: dict[str, Any] = {"pipeline_model_parallel_layout": pipeline_layout(args)}
    if noop_layers(args):
        from megatron.core.utils import scaled_init_method_normal

        # Distributed checkpoints name each layer, instead of keeping all layers in one tensor with holes in it.
        fields["hetereogenous_dist_checkpoint"] = True
        # megatron-core's own depends on `num_layers`, and would start the same model with smaller weights.
        fields["output_layer_init_method"] = scaled_init_method_normal(args.init_method_std, num_real_layers(args))
    return fields


def _pipeline(args: Namespace) -> Topology:
    pp, parts = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    return Topology(
        pp=pp,
        layers_per_virtual_stage=None if parts is None else args.num_layers // pp // parts,
        num_layer_list=args.num_layer_list,
        noop_layers=noop_layers(args),
    )
