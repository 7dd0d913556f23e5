"""LoRA: small matrices beside frozen weights are trained."""

from __future__ import annotations

import argparse

from mindspeed_llm.core.lora.settings import LAYERS, PARTS, TARGETS
from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.feature import ArgumentTarget, Feature
from mindspeed_llm.flag import number, one_of, positive

_NAMES = " ".join(TARGETS)


class Lora(Feature):
    """`core.lora` has the layers, `training.setup` puts them on a model, `training.checkpointing` saves them."""

    name = "lora"
    description = "train low-rank adapters beside frozen weights"

    def register_arguments(self, group: ArgumentTarget) -> None:
        """Add the flags of LoRA."""
        group.add_argument(
            "--lora-target-modules",
            type=one_of(TARGETS),
            nargs="+",
            default=[],
            metavar="NAME",
            help="train adapters on these linear layers, and nothing else: linear_proj, linear_fc2; linear_qkv and "
            "linear_fc1 with one A for their parts, or linear_q linear_k linear_v linear_fc1_gate linear_fc1_up "
            "with one for each, as PEFT has it.",
        )
        group.add_argument(
            "--lora-r", type=positive, default=16, metavar="N", help="rank of the adapters; by default 16."
        )
        group.add_argument(
            "--lora-alpha",
            type=number,
            default=32.0,
            metavar="X",
            help="adapters are multiplied by this number divided by the rank; by default 32.",
        )
        group.add_argument(
            "--lora-load",
            metavar="DIR",
            help="folder of adapters to go on from: checkpoints of a run, or one adapter in PEFT's files. The model "
            "comes from --load.",
        )
        group.add_argument(
            "--lora-ckpt-filter", action="store_true", help="save the adapters alone, without the model's weights."
        )
        group.add_argument(
            "--save-lora-to-hf",
            action="store_true",
            help="write the adapters in PEFT's files, too: with each checkpoint, into its folder hf_adapter.",
        )
        group.add_argument(
            "--hf-save-dir",
            metavar="DIR",
            help="write those of --save-lora-to-hf into this folder instead, one folder for each checkpoint.",
        )
        group.add_argument(
            "--hf-cfg-dir",
            metavar="DIR",
            help="folder with the config.json of the Hugging Face model, by which --save-lora-to-hf names layers; by "
            "default that of --load, else of --model-from-hf.",
        )

    def is_on(self, args: argparse.Namespace) -> bool:
        """Whether any layer is to have an adapter."""
        return bool(args.lora_target_modules)

    def validate(self, args: argparse.Namespace) -> None:
        """Refuse flags without what they are for, two adapters on one layer, and layers that the model has not."""
        for flag, folder in (("--hf-save-dir", args.hf_save_dir), ("--hf-cfg-dir", args.hf_cfg_dir)):
            if folder is not None and not args.save_lora_to_hf:
                raise UserError(
                    f"{flag} {folder} is for adapters in PEFT's files; add --save-lora-to-hf, or leave {flag} out and "
                    "write Hugging Face weights with convert_ckpt_v2.py after the run"
                )
        if not self.is_on(args):
            for flag, given in (
                ("--lora-r", args.lora_r if "lora_r" in args.given else None),
                ("--lora-alpha", args.lora_alpha if "lora_alpha" in args.given else None),
                ("--lora-load", args.lora_load),
                ("--lora-ckpt-filter", args.lora_ckpt_filter),
                ("--save-lora-to-hf", args.save_lora_to_hf),
            ):
                if given not in (None, False):
                    shown = "" if given is True else f" {given:g}" if isinstance(given, float) else f" {given}"
                    raise UserError(
                        f"{flag}{shown} is for adapters, but --lora-target-modules "
                        f"names no layers to have any; add it with some of {_NAMES}, or leave {flag} out"
                    )
            return
        if args.save_lora_to_hf and args.save is None:
            raise UserError("--save-lora-to-hf writes adapters with each checkpoint, and none is saved; add --save DIR")
        targets = args.lora_target_modules
        flag = f"--lora-target-modules {' '.join(targets)}"
        for target in targets:
            if targets.count(target) > 1:
                raise UserError(f"{flag}: {target} stands there twice; name each layer once")
        for layer, parts in PARTS.items():
            if layer in targets and (both := [part for part in parts if part in targets]):
                raise UserError(f"{flag}: {layer} and {both[0]} are both adapters on one layer; keep one of them")
        if args.lora_alpha == 0:
            raise UserError("--lora-alpha 0.0: adapters would be multiplied by 0; expected another number, such as 32")
        gated = [target for target in targets if target in PARTS["linear_fc1"]]
        if gated and not args.swiglu:
            raise UserError(
                f"{flag}: the MLPs of a model without --swiglu have no {gated[0]}; expected some of "
                f"{' '.join((*LAYERS, *PARTS['linear_qkv']))}"
            )
        if gated and args.num_experts and args.moe_grouped_gemm:
            raise UserError(
                f"{flag}: with --moe-grouped-gemm an expert's adapter is one for gate and up, so that for {gated[0]} "
                "experts would get none; give linear_fc1, or leave --moe-grouped-gemm out"
            )
