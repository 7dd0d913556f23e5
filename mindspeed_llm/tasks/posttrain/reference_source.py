"""Where the reference of preference optimisation comes from. Nothing here needs torch."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.folders import hf_directory, in_words_of


@dataclass(frozen=True, kw_only=True)
class ReferenceSource:
    """A folder that holds the reference's weights: a Hugging Face directory, or checkpoints of which one is taken."""

    folder: Path
    is_hf: bool
    step: int | None
    """The step of the checkpoint; None: the latest one."""
    flag: str

    @property
    def words(self) -> dict[str, str]:
        """The flags that stand for those of a run's own checkpoint, see `training.folders.in_words_of`."""
        return {"--load": self.flag, "--ckpt-step": "--refer-model-iter"}


def reference_source(args: Namespace) -> ReferenceSource | None:
    """The folder that the flags name; None: the reference is the policy, as it was or without its adapters.

    Raises:
        UserError: there is no such folder, or --refer-model-iter names a step of what has none.
    """
    step = args.refer_model_iter
    if args.ref_model is None and step is None:
        return None
    flag, name = ("--ref-model", args.ref_model) if args.ref_model is not None else ("--load", args.load)
    if name is None or (args.ref_model is None and args.lora_target_modules):
        raise UserError(
            f"--refer-model-iter {step} names a checkpoint below --ref-model, which is missing; give it, or leave "
            "--refer-model-iter out"
        )
    folder = Path(name)
    if not folder.is_dir():
        raise UserError(
            f"{flag} {folder} is no folder; expected a Hugging Face model directory or the folder of checkpoints that "
            "holds the reference"
        )
    with in_words_of({"--load": flag}):
        is_hf = hf_directory(Namespace(load=name, enable_hf2mg_convert=False)) is not None
    if is_hf and step is not None:
        raise UserError(
            f"--refer-model-iter {step} names a checkpoint, but {flag} {folder} is a Hugging Face model directory; "
            "leave --refer-model-iter out"
        )
    return ReferenceSource(folder=folder, is_hf=is_hf, step=step, flag=flag)
