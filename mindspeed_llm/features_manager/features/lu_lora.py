"""LU-LoRA: the adapters of the first layers learn by a local rule, without backpropagation."""

from __future__ import annotations

import argparse

from mindspeed_llm.core.layer_layout import layers_at, num_real_layers
from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature
from mindspeed_llm.flag import count, number

_FLAG = "--lu-lora-final-layer-index"
_OF_MLPS = "linear_fc"


class LuLora(Feature):
    """`core.lora.local_learning` has the rule, `core.lora.local_layers` ends gradients, `training.train_step` calls."""

    name = "lu_lora"
    description = "update the adapters of the first layers by Oja's rule instead of backpropagation"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add the flags of LU-LoRA."""
        group.add_argument(
            _FLAG,
            type=count,
            metavar="N",
            help="update the adapters of layers 0 to N by Oja's rule in the forward pass, and train the others by "
            "backpropagation, which ends behind layer N. Noop layers are not counted.",
        )
        group.add_argument(
            "--lu-lora-lr",
            type=_above_zero,
            default=1.25e-6,
            metavar="X",
            help="learning rate of A in layers with local updates, where the schedule is at --lr; by default 1.25e-6.",
        )
        group.add_argument(
            "--lu-lora-lr-ratio",
            type=_above_zero,
            default=1.0,
            metavar="X",
            help="learning rate of B divided by that of A, in all layers; by default 1, recommended is 24.",
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether any layer has local updates."""
        return args.lu_lora_final_layer_index is not None

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse it without adapters, without a layer left to train, and where the rule would not be exact."""
        final = args.lu_lora_final_layer_index
        if final is None:
            return
        flag = f"{_FLAG} {final}"
        if not args.lora_target_modules:
            raise UserError(
                f"{flag} is for adapters, but --lora-target-modules names no layers to have any; add it, or leave "
                f"{_FLAG} out"
            )
        last = num_real_layers(args) - 1
        if final >= last:
            raise UserError(
                f"{flag}: the model's layers are 0 to {last}, and the last one has to learn from the loss, or nothing "
                + (f"would; expected 0 to {last - 1}" if last else f"would; leave {_FLAG} out")
            )
        targets = [target for target in args.lora_target_modules if target.startswith(_OF_MLPS)]
        if targets and (first := _first_with_experts(args)) is not None and first <= final:
            without = f"--lora-target-modules without {' '.join(targets)}"
            raise UserError(
                f"{flag} with --lora-target-modules {' '.join(targets)}: layer {first} has experts, whose adapters "
                f"have no local updates; give {without}" + (f", or {_FLAG} {first - 1}" if first else "")
            )
        if args.lr == 0:
            raise UserError(f"{flag}: local updates follow the schedule of --lr, found --lr 0; give the highest rate")
        if args.lu_lora_lr_ratio != 1 and args.lr_warmup_init:
            raise UserError(
                f"--lu-lora-lr-ratio {args.lu_lora_lr_ratio:g} with --lr-warmup-init {args.lr_warmup_init:g}: the "
                "warm-up would begin at one rate for A and B; leave --lr-warmup-init out"
            )


def _first_with_experts(args: argparse.Namespace) -> int | None:
    """The first layer of the model that has experts."""
    if not args.num_experts:
        return None
    kinds = zip(args.moe_layer_pattern, layers_at(args), strict=True)
    return next((layer for has_experts, layer in kinds if has_experts and layer is not None), None)


def _above_zero(text: str) -> float:
    found = number(text)
    if found <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return found
