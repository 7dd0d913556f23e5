"""Rows that run on the rank pool: models of the Megatron backend, filled from a directory and compared with it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.megatron_args import megatron_args
from tests.tasks.models.families import labels_of
from tests.tasks.models.mutants import MUTANTS
from tests.tasks.models.sessions import build, loaded, own_part, row, run_schedule, session


@row
def compare(
    *,
    folder: str,
    gradients: str | None = "gradients",
    checkpoint: str | None = None,
    mutant: str | None = None,
    **values: Any,
) -> dict[str, Any]:
    """Logits and gradients of the model in `folder` against the reference beside it.

    Args:
        gradients: the directory in `folder` that has the reference's gradients; None: they are not compared.
        checkpoint: a Megatron checkpoint that the weights come from; None: from `folder`.
        mutant: a deliberate fault, see `mutants`.

    Returns:
        `logits`: the greatest difference in standard deviations of the reference, and `padding`: whether the logits of
        padding are all minus infinity and no others are, on ranks of the last stage; `gradients`: for each parameter of
        this rank the norm of the difference relative to the norm of the reference.
    """
    path = Path(folder)
    args = megatron_args(path, world_size=dist.get_world_size(), **values)
    with session(args), MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        reference = torch.load(path / "reference.pt")
        chunks = loaded(args, path) if checkpoint is None else loaded_from_files(args, Path(checkpoint))
        for chunk in chunks:
            chunk.eval()
        found: dict[str, Any] = {}
        if outputs := run_schedule(chunks, args, reference["ids"]):
            logits, whole = torch.cat(outputs), reference["logits"]
            expected = own_part(whole, logits.shape[-1])
            real = expected.isfinite()
            found["logits"] = float(((logits - expected)[real].abs().max() if real.any() else 0.0) / whole.std())
            found["padding"] = torch.equal(logits.isfinite(), real)
        if gradients:
            found["gradients"] = _gradient_errors(chunks, args, path / gradients, reference["ids"])
        return found


def loaded_from_files(args: Namespace, folder: Path) -> list[nn.Module]:
    """The chunks of this rank, filled by `load_state_dict` from this rank's file of a Megatron checkpoint."""
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.checkpoint.layout import Rank
    from mindspeed_llm.tasks.models.hf_weights import topology_of

    rank = Rank(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
    )
    [file] = folder.glob(f"*/{rank.folder(topology_of(args))}/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    chunks = build(args)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(content["model" if len(chunks) == 1 else f"model{index}"], strict=True)
    return chunks


def _gradient_errors(chunks: Sequence[nn.Module], args: Namespace, right: Path, ids: Tensor) -> dict[str, float]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    data_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config=config, ddp_config=data_config, module=chunk) for chunk in chunks]
    for chunk in wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    # Micro batches are dealt out to data-parallel ranks in turns.
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    mine, labels = (torch.cat(whole.split(args.micro_batch_size)[rank::size]) for whole in (ids, labels_of(ids)))
    run_schedule(wrapped, args, mine, labels=labels)
    errors = {}
    for index, (chunk, expected) in enumerate(zip(chunks, loaded(args, right), strict=True)):
        of_reference = dict(expected.named_parameters())
        for name, parameter in chunk.named_parameters():
            gradient = of_reference[name].detach()
            difference = (parameter.main_grad - gradient).norm()
            errors[f"{index}/{name}"] = float(difference / gradient.norm()) if gradient.norm() else float(difference)
    return errors


@row
def switched(*, folder: str, switches: dict[str, Any], **values: Any) -> dict[str, Any]:
    """The model with and without these arguments: how often each operator of `platform` is called with them, and the
    greatest difference of the logits and of the gradients, in standard deviations and norms as in `compare`.
    """
    from mindspeed_llm.platform.operators import dispatch

    path = Path(folder)
    calls = dict.fromkeys(("attention", "rms_norm", "rotary", "rotate", "swiglu"), 0)

    def counted(name: str, operator: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return operator(*arguments, **options)

        return call

    outcomes = []
    with contextlib.ExitStack() as stack:
        for name in calls:
            stack.enter_context(mock.patch.object(dispatch, name, counted(name, getattr(dispatch, name))))
        for chosen in ({}, switches):
            args = megatron_args(path, **values, **chosen)
            with session(args):
                before = dict(calls)
                [chunk] = loaded(args, path)
                ids = torch.load(path / "reference.pt")["ids"]
                logits = torch.cat(run_schedule([chunk], args, ids))[..., : args.vocab_size]
                run_schedule([chunk.train()], args, ids, labels=labels_of(ids))
                outcomes.append((logits, {name: p.grad.clone() for name, p in chunk.named_parameters()}))
            if not chosen:
                assert calls == before, "operators are called without switches"
    (logits, gradients), (other_logits, other_gradients) = outcomes
    return {
        "calls": calls,
        "logits": float((logits - other_logits).abs().max() / logits.std()),
        "gradients": max(
            float((gradient - other_gradients[name]).norm() / gradient.norm())
            for name, gradient in gradients.items()
            if gradient.norm()
        ),
    }


@row
def documents(
    *, folder: str, lengths: Sequence[Sequence[int]], told: bool = True, **values: Any
) -> dict[str, Any] | None:
    """Packed samples: of each one the lengths of its documents, in order.

    Args:
        told: whether the model is told the documents.

    Returns:
        on the last stage `logits` of this rank [samples, S, V of this rank]; and `moved`: for each document (sample,
        number) that gets other tokens, whether logits of each document changed.
    """
    path = Path(folder)
    args = megatron_args(path, world_size=dist.get_world_size(), global_batch_size=len(lengths), **values)
    numbers = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in lengths])
    with session(args):
        chunks = loaded(args, path)
        for chunk in chunks:
            # As in training, where recomputation happens; there is no dropout.
            chunk.train()
        ids = torch.load(path / "reference.pt")["ids"][: len(lengths)]

        def logits_of(ids: Tensor) -> Tensor | None:
            outputs = run_schedule(chunks, args, ids, documents=numbers if told else None)
            return torch.cat(outputs) if outputs else None

        whole, moved = logits_of(ids), {}
        places = {(sample, n): numbers[sample] == n for sample, each in enumerate(lengths) for n in range(len(each))}
        for changed, place in places.items():
            other = ids.clone()
            other[changed[0], place] = (other[changed[0], place] + 101) % args.vocab_size
            logits = logits_of(other)
            if logits is not None:
                moved[changed] = {
                    document: not torch.equal(logits[document[0], at], whole[document[0], at])
                    for document, at in places.items()
                }
        return None if whole is None else {"logits": whole.numpy(), "moved": moved}


@row
def load_with(
    *, folder: str, split: dict[str, Any], changes: dict[str, Any], weights: str | None = None
) -> dict[str, Any]:
    """Load weights into a model that some arguments were changed for.

    Args:
        folder: whose structure the run has.
        split: arguments to begin with.
        changes: arguments that are changed after all checks.
        weights: where the weights come from, unless from `folder`.

    Returns:
        `warnings`; `expert_bytes`, how much of routed experts' tensors was read; `dtypes` of the parameters;
        `embedding`, this rank's, in fp32 (None on stages without).
    """
    from mindspeed_llm.tasks.checkpoint import sources
    from mindspeed_llm.tasks.models.hf_weights import load_hf_weights

    args = megatron_args(Path(folder), world_size=dist.get_world_size(), **split)
    vars(args).update(changes)
    read = 0
    original = sources.HfSource.read

    def counted(self: Any, name: str, box: Any) -> Iterator[Any]:
        nonlocal read
        for place, values in original(self, name, box):
            read += values.nbytes if "experts" in name else 0
            yield place, values

    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mindspeed_llm")
    logger.addHandler(handler)
    try:
        with session(args), mock.patch.object(sources.HfSource, "read", counted):
            chunks = build(args)
            load_hf_weights(chunks, Path(weights or folder), args)
            embedding = getattr(chunks[0], "embedding", None)
            return {
                "warnings": messages,
                "expert_bytes": read,
                "dtypes": {str(parameter.dtype) for chunk in chunks for parameter in chunk.parameters()},
                "embedding": embedding and embedding.word_embeddings.weight.detach().float().numpy(),
            }
    finally:
        logger.removeHandler(handler)


@row
def reshard(
    *, folder: str, checkpoint: str, saved: dict[str, Any], loaded_with: dict[str, Any]
) -> tuple[list[str], int]:
    """Save a distributed checkpoint of the model under one topology and load it under another.

    Returns:
        the parameters of this rank that are not bit for bit those of the directory, and how many are.
    """
    from megatron.core import dist_checkpointing

    path, target = Path(folder), Path(checkpoint)
    args = megatron_args(path, world_size=dist.get_world_size(), **saved)
    with session(args):
        if dist.get_rank() == 0:
            target.mkdir()
        dist.barrier()
        # megatron-core's writer starts processes of its own, which ranks of the pool, being daemons, may not.
        with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
            dist_checkpointing.save(_sharded(loaded(args, path)), str(target))
    args = megatron_args(path, world_size=dist.get_world_size(), **loaded_with)
    with session(args):
        chunks = build(args)
        state = dist_checkpointing.load(_sharded(chunks), str(target))
        wrong, right = [], 0
        for index, (chunk, expected) in enumerate(zip(chunks, loaded(args, path), strict=True)):
            # A part that has layers without parameters only has no entry.
            chunk.load_state_dict(state.get(f"model{index}", {}), strict=True)
            of_directory = dict(expected.named_parameters())
            for name, parameter in chunk.named_parameters():
                if torch.equal(parameter, of_directory[name]):
                    right += 1
                else:
                    wrong.append(name)
        return wrong, right


def _sharded(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    return {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(chunks)}


@row
def with_dropout(*, folder: str, **values: Any) -> dict[str, Any]:
    """One step of training with dropout: `losses` of micro batches (on the last stage), `gradients`, sums that tell
    them apart bit by bit, and `attention`, for each layer and micro batch the elements that are dropped for the first
    token.
    """
    from mindspeed_llm.core.attention import CoreAttention

    path = Path(folder)
    args = megatron_args(
        path, world_size=dist.get_world_size(), **{"hidden_dropout": 0.1, "attention_dropout": 0.2, **values}
    )
    with session(args):
        chunks = loaded(args, path)
        ids = torch.load(path / "reference.pt")["ids"]
        outputs: list[Tensor] = []
        for chunk in chunks:
            chunk.train()
            for module in chunk.modules():
                if isinstance(module, CoreAttention):
                    module.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
        losses = run_schedule(chunks, args, ids, labels=labels_of(ids))
        gradients = {
            f"{index}/{name}": parameter.grad.view(torch.int32).sum().item()
            for index, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }
        # The first token sees itself alone: its output is zero where that one weight is dropped.
        zeros = [(output[0] == 0).flatten().tolist() for output in outputs]
        return {"losses": [float(loss["loss"]) for loss in losses], "gradients": gradients, "attention": zeros}


@row
def attention(*, folder: str, tensors: Sequence[Any], documents: Any, **values: Any) -> list[Any]:
    """The core of the first layer's attention: its output for query, key and value, and the gradients of these where
    the output's is the fourth tensor.
    """
    args = megatron_args(Path(folder), **values)
    with session(args):
        [chunk] = build(args)
        *inputs, weights = (torch.from_numpy(array) for array in tensors)
        inputs = [tensor.requires_grad_() for tensor in inputs]
        numbers = None if documents is None else torch.from_numpy(documents)
        output = chunk.decoder.layers[0].self_attention.core_attention(*inputs, numbers)
        gradients = torch.autograd.grad(output, inputs, weights)
        return [tensor.detach().numpy() for tensor in (output, *gradients)]


@row
def parameter_names(*, folder: str, unchecked: dict[str, Any] | None = None, **values: Any) -> list[list[str]]:
    """The names of the parameters of each chunk of this rank; `unchecked` arguments are set after all checks."""
    args = megatron_args(Path(folder), world_size=dist.get_world_size(), **values)
    vars(args).update(unchecked or {})
    with session(args):
        return [[name for name, _ in chunk.named_parameters()] for chunk in build(args)]
