"""From flags to a model that can be asked, whatever kind it is of."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference import stopping
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.source import ModelSource, find_source, world_size_of
from mindspeed_llm.tasks.inference.source_tokenizer import early_tokenizer, required_tokenizer
from mindspeed_llm.tasks.inference.tokenizer import doubts, named_tokenizer, names_tokenizer
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer

if TYPE_CHECKING:
    from mindspeed_llm.tasks.inference.backend import Backend

_OPTIMIZER_FILES = ("distrib_optim.pt",)
_LOG = logging.getLogger("mindspeed_llm")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".distcp")


def load_causal_lm(args: Namespace, source: ModelSource | None = None, tokenizer: Tokenizer | None = None) -> CausalLM:
    """The model that the flags name, on the ranks of this job (a collective); a line of the log says what it is.

    Args:
        args: of `arguments.inference` or `tasks.evaluation.arguments`.
        source: what `find_source` has found, where that was asked before.
        tokenizer: that of the model, where it was loaded before (transformers' backend alone takes it).

    Raises:
        UserError: what --load names cannot be loaded, has no tokenizer, or contradicts the flags.
    """
    source = source or find_source(args, world_size_of(args))
    if source.backend == "hf":
        backend, tokenizer, folder, facts = _load_hf(args, source, tokenizer)
    else:
        backend, tokenizer, folder, facts = _load_megatron(args, source)
    if len(tokenizer) > backend.vocab_size and _largest_id(tokenizer) >= backend.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {backend.vocab_size}; name the tokenizer of this "
            "model with --tokenizer-name-or-path"
        )
    description = f"{source.description}; {', '.join(facts)}"
    _LOG.info("loaded %s", description)
    ends = stopping.of_generation_config(folder)
    for line in _doubts(args, tokenizer, backend.vocab_size, ends, folder):
        _LOG.warning(line)
    return CausalLM(
        backend,
        tokenizer,
        stop_ids=stopping.stop_ids(tokenizer, others=ends),
        batch_size=_batch_size(args),
        description=description,
        fingerprint=weights_fingerprint(args, source),
    )


def _load_hf(
    args: Namespace, source: ModelSource, tokenizer: Tokenizer | None
) -> tuple[Backend, Tokenizer, Path | None, list[str]]:
    from mindspeed_llm.platform import distributed
    from mindspeed_llm.tasks.inference.adapters.hf_load import load_hf

    # First, so that a mistake about it is not met behind the weights.
    if tokenizer is None:
        tokenizer = early_tokenizer(args, source)
    backend, folder = load_hf(
        source.path,
        source.kind,
        dtype=args.dtype,
        base_model=None if args.base_model is None else Path(args.base_model),
        shard=args.shard_weights,
        trust_remote_code=args.trust_remote_code,
    )
    if tokenizer is None:
        tokenizer = named_tokenizer(args, str(folder))
    assert tokenizer is not None, "a folder is named"
    model = backend.model
    facts = [
        type(model).__name__,
        f"{model.num_parameters():,} parameters",
        str(next(iter(model.parameters())).dtype).removeprefix("torch."),
        _spread(backend, distributed.world_size()) + (", sharded" if args.shard_weights else ""),
    ]
    return backend, tokenizer, folder, facts


def _load_megatron(args: Namespace, source: ModelSource) -> tuple[Backend, Tokenizer, Path | None, list[str]]:
    from mindspeed_llm.tasks.inference.megatron_model import complete

    complete(args, source)
    tokenizer = required_tokenizer(args, source)
    if args.vocab_size is None and args.padded_vocab_size is None:
        args.vocab_size = len(tokenizer)
    from mindspeed_llm.tasks.inference.adapters.megatron_arguments import for_inference
    from mindspeed_llm.tasks.inference.adapters.megatron_load import load_megatron
    from mindspeed_llm.training.arguments.parameters import model_of, whole_model
    from mindspeed_llm.training.checkpointing import layout

    backend = load_megatron(args)
    model = model_of(for_inference(args, world_size_of(args)))
    name = args.tokenizer_name_or_path
    folder = Path(name) if name is not None and Path(name).is_dir() else None
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size)
    step = None if source.kind == "hf" else _step(args, source.path)
    facts = [] if source.kind == "hf" else [layout.RELEASE if step is None else f"step {step}"]
    facts += [
        f"GPTModel of {args.num_layers} layers",
        f"{whole_model(model):,} parameters",
        str(backend.dtype).removeprefix("torch."),
        "TP {} x PP {} x EP {}".format(*sizes),
        _spread(backend, world_size_of(args)),
    ]
    return backend, tokenizer, folder, facts


def _doubts(
    args: Namespace, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int], folder: Path | None
) -> Iterator[str]:
    """What is suspicious about the tokens of the model; `folder` is that of its own tokenizer."""
    if names_tokenizer(args):
        name = args.tokenizer_name_or_path
        folder_of_tokenizer = Path(name) if name is not None and Path(name).is_dir() else None
    else:
        folder_of_tokenizer = folder
    yield from doubts(tokenizer, vocab_size, folder_of_tokenizer)
    if beyond := [end for end in ends if end >= vocab_size]:
        yield (
            f"{folder}/generation_config.json: eos_token_id {', '.join(map(str, beyond))}, but the model has "
            f"{vocab_size} tokens: no answer ends there; expected ids below {vocab_size}"
        )


def _spread(backend: Backend, ranks: int) -> str:
    copies = "1 copy" if backend.replicas == 1 else f"{backend.replicas} copies"
    return f"{copies} on {ranks} {backend.device.type} rank{'s' if ranks > 1 else ''}"


def _largest_id(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab().values(), default=0)


def _batch_size(args: Namespace) -> int:
    """inference.py and evaluation.py each have a flag for it."""
    return args.batch_size if hasattr(args, "batch_size") else args.evaluation_batch_size


def weights_fingerprint(args: Namespace, source: ModelSource) -> str | None:
    """What tells the weights from others of the same shapes at a look, adapters and their model taken together; None
    where no file has any (a hub id). Weights that differ in a few rows of a tensor may have the same.
    """
    from mindspeed_llm.fsdp2.config.weight_layout import fingerprint

    found = list(weight_files(args, source))
    return fingerprint(found) if found else None


def weight_files(args: Namespace, source: ModelSource) -> Iterator[Path]:
    """The files of weights, in an order that does not depend on where the folders lie."""
    for folder in _weight_folders(args, source):
        # Of the Megatron backend each rank has a folder.
        files = [*folder.glob("*"), *folder.glob("mp_rank_*/*")]
        yield from sorted(file for file in files if file.suffix in _WEIGHT_FILES and file.name not in _OPTIMIZER_FILES)


def _weight_folders(args: Namespace, source: ModelSource) -> Iterator[Path]:
    """The folders that weights are read from, those of adapters included."""
    yield _checkpoint(source.path, _step(args, source.path)) if source.kind == "mcore" else source.path
    if args.base_model is not None:
        yield Path(args.base_model)
    elif source.kind == "peft":
        from mindspeed_llm.tasks.inference.adapters.hf_load import base_of

        yield base_of(source.path)
    if args.lora_load is not None:
        from mindspeed_llm.tasks.checkpoint.peft_files import is_peft

        folder = Path(args.lora_load)
        yield folder if is_peft(folder) else _checkpoint(folder, _latest(folder, args.ckpt_step))


def _step(args: Namespace, folder: Path) -> int | None:
    """The step of the checkpoint in a folder of Megatron checkpoints; None: a release, which is no step of a run."""
    # With --lora-load a step is that of the adapters.
    return _latest(folder, args.ckpt_step if args.lora_load is None else None)


def _latest(folder: Path, step: int | None) -> int | None:
    """The step that is loaded where `step` is asked for, or nothing; None: a release."""
    from mindspeed_llm.training.checkpointing.publishing import look

    if step is not None:
        return step
    shelf = look(folder)
    if shelf.tracker.is_release or shelf.tracker.iteration is not None or not shelf.iterations:
        return shelf.tracker.iteration
    return shelf.iterations[-1]


def _checkpoint(folder: Path, step: int | None) -> Path:
    """The folder of a step among others, or of the release."""
    from mindspeed_llm.training.checkpointing import layout

    return folder / (layout.RELEASE if step is None else layout.iteration_name(step))
