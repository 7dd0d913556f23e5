"""The reference of preference optimisation: a model that is not trained, cut over the ranks as the policy is."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import Float16Module
from torch import nn

from mindspeed_llm.core.lora.attach import without_adapters
from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.models.config import transformer_config
from mindspeed_llm.tasks.models.hf_weights import load_hf_weights
from mindspeed_llm.tasks.posttrain.reference_source import ReferenceSource, reference_source
from mindspeed_llm.training.checkpointing import load_weights
from mindspeed_llm.training.data.datasets import Progress
from mindspeed_llm.training.folders import in_words_of
from mindspeed_llm.training.setup import TrainingModel, build_chunks, complete_weights


@dataclass(frozen=True)
class Reference:
    """The chunks of this rank."""

    chunks: Sequence[nn.Module]

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """A context in which the chunks are the reference: no gradients, no dropout, no adapters."""
        was_training = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        try:
            with torch.no_grad(), without_adapters(self.chunks):
                yield
        finally:
            for chunk, mode in zip(self.chunks, was_training, strict=True):
                chunk.train(mode)


def build_reference(args: Namespace, model: TrainingModel, progress: Progress | None) -> Reference:
    """The reference that the flags name (a collective): the model of --ref-model; else, of a policy with adapters, the
    policy itself without them; else a copy of the policy.

    Args:
        args: validated arguments.
        model: the policy, before its first step.
        progress: how far the run is; None at its beginning.

    Raises:
        UserError: the weights do not belong to the model, or are no longer those that the run began with.
    """
    source = reference_source(args)
    if source is None and args.lora_target_modules:
        return Reference(model.chunks)
    if source is None and progress is not None and progress.iteration:
        raise UserError(
            f"the run goes on at step {progress.iteration}, and its reference is the model that it began with, which "
            f"--load {args.load} is not any more; name that one with --ref-model"
        )
    config = transformer_config(args)
    # The weights are filled in: drawing numbers for them would change those that dropout gets. (Some modules draw
    # theirs whatever the configuration says.)
    config.perform_initialization = False
    with torch.random.fork_rng(devices=[]):
        modules = build_chunks(args, config)
    if source is None:
        with complete_weights(model):
            for module, policy in zip(modules, model.modules, strict=True):
                module.load_state_dict(policy.state_dict())
    else:
        _load(modules, source, args)
    for module in modules:
        module.requires_grad_(False)
    chunks = [Float16Module(config, module) for module in modules] if args.bf16 or args.fp16 else modules
    return Reference(chunks)


def _load(modules: Sequence[nn.Module], source: ReferenceSource, args: Namespace) -> None:
    try:
        with in_words_of(source.words):
            if source.is_hf:
                load_hf_weights(modules, source.folder, args)
                return
            named = {"load": str(source.folder), "ckpt_step": source.step, "finetune": True, "save": None}
            load_weights(Namespace(**{**vars(args), **named}), modules)
    except UserError as error:
        if any(flag in str(error) for flag in source.words.values()):
            raise
        raise UserError(
            f"{source.flag}: {error} (the reference is built by the same flags as the model that is trained)"
        ) from error
