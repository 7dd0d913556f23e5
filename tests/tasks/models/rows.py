"""Rows that run on the rank pool: models of the Megatron backend, filled from a directory and compared with it."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.platform import cuda_names
from tests.support.megatron_args import megatron_args
from tests.tasks.models.families import labels_of


@contextlib.contextmanager
def session(args: Namespace) -> Iterator[None]:
    """Everything that models need of megatron-core in this process, undone at the end."""
    cuda_names.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    manager = FeaturesManager(FEATURES)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        )
        random.model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)
        manager.apply(args)
        try:
            yield
        finally:
            manager.undo()
    finally:
        parallel_state.destroy_model_parallel()
        random.initialize_rng_tracker(force_reset=True)
        cuda_names.uninstall()


def build(args: Namespace) -> list[nn.Module]:
    """The chunks of this rank."""
    from megatron.core import parallel_state

    from mindspeed_llm.tasks.models.config import transformer_config
    from mindspeed_llm.tasks.models.provider import build_model

    config = transformer_config(args)
    count = args.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(count or 1):
        vp_stage = None if count is None else stage
        ends = [
            end(ignore_virtual=count is None, vp_stage=vp_stage)
            for end in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        ]
        chunks.append(build_model(args, config, pre_process=ends[0], post_process=ends[1], vp_stage=vp_stage))
    return chunks


def loaded(args: Namespace, folder: Path) -> list[nn.Module]:
    """The chunks of this rank with the weights in `folder`."""
    from mindspeed_llm.tasks.models.hf_weights import load_hf_weights

    chunks = build(args)
    load_hf_weights(chunks, folder, args)
    return chunks


def run_schedule(
    chunks: Sequence[nn.Module],
    args: Namespace,
    ids: Tensor,
    *,
    documents: Tensor | None = None,
    labels: Tensor | None = None,
) -> list[Any]:
    """Run megatron-core's schedule over the samples, one of them in a micro batch.

    Returns:
        on the last stage one element for each sample: without labels its logits [1, S, V of this rank]; with them its
        summed loss. The latter also runs the backward pass.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    count, length = ids.shape
    batches = [
        {
            "input_ids": ids[row : row + 1],
            "position_ids": torch.arange(length)[None],
            "attention_mask": None if documents is None else documents[row : row + 1],
            "labels": None if labels is None else labels[row : row + 1],
        }
        for row in range(count)
    ]

    def forward_step(batch_iterator: Iterator[dict[str, Any]], model: nn.Module) -> tuple[Tensor, Any]:
        return model(**next(batch_iterator)), output_of

    def output_of(output: Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output.detach().clone()
        total = output.sum()
        return total, torch.tensor(output.numel(), dtype=torch.int), {"loss": total.detach()}

    iterators = [iter(batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=count,
        seq_length=length,
        micro_batch_size=1,
        forward_only=labels is None,
        collect_non_loss_data=labels is None,
    )


def own_part(whole: Tensor, width: int) -> Tensor:
    """This rank's columns of logits over the vocabulary, padded with minus infinity to `width` a rank."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    padding = torch.full((*whole.shape[:-1], width * size - whole.shape[-1]), -torch.inf)
    return torch.cat((whole, padding), dim=-1)[..., rank * width : (rank + 1) * width]


def distance(found: Sequence[Tensor], whole: Tensor) -> float:
    """The greatest difference between this rank's logits and the reference's, in its standard deviations."""
    logits = torch.cat(list(found))
    expected = own_part(whole, logits.shape[-1])
    real = expected.isfinite()
    assert torch.equal(logits.isfinite(), real), "padding of the vocabulary must be minus infinity, and nothing else"
    return float((logits - expected)[real].abs().max() / whole.std()) if real.any() else 0.0


def compare(*, folder: str, gradients: bool = True, **values: Any) -> dict[str, Any]:
    """Logits and gradients of the model in `folder` against the reference beside it.

    Returns:
        `logits`: see `distance`, 0 on other stages than the last; `gradients`: for each parameter of this rank the norm
        of the difference relative to the reference's norm.
    """
    path = Path(folder)
    args = megatron_args(path, world_size=dist.get_world_size(), **values)
    with session(args):
        reference = torch.load(path / "reference.pt")
        chunks = loaded(args, path)
        for chunk in chunks:
            chunk.eval()
        outputs = run_schedule(chunks, args, reference["ids"])
        found: dict[str, Any] = {"logits": distance(outputs, reference["logits"]) if outputs else 0.0}
        if gradients:
            found["gradients"] = _gradient_errors(chunks, args, path, reference["ids"])
        return found


def _gradient_errors(chunks: Sequence[nn.Module], args: Namespace, path: Path, ids: Tensor) -> dict[str, float]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    data_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config=config, ddp_config=data_config, module=chunk) for chunk in chunks]
    for chunk in wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    # Each data-parallel rank has samples of its own.
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    mine = ids[rank::size]
    run_schedule(wrapped, args, mine, labels=labels_of(ids)[rank::size])
    errors = {}
    for index, (chunk, expected) in enumerate(zip(chunks, loaded(args, path / "gradients"), strict=True)):
        of_reference = dict(expected.named_parameters())
        for name, parameter in chunk.named_parameters():
            right = of_reference[name].detach()
            difference = (parameter.main_grad - right).norm()
            errors[f"{index}/{name}"] = float(difference / right.norm()) if right.norm() else float(difference)
    return errors
