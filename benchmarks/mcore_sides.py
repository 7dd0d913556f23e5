"""The contestants of the Megatron backend: the package's own training loop, stopped before each step, and a bare loop
over megatron-core's forward-backward function.

Both train the same model from the same weights on the same micro batches, with AdamW (lr 1e-5, betas 0.9/0.95, decay
0.01) and clipping at 1.0, fp32.
"""

from __future__ import annotations

import contextlib
import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

LEARNING_RATE, BETAS, DECAY, CLIP = 1e-5, (0.9, 0.95), 0.01, 1.0
Batch = dict[str, Tensor]
Training = Callable[[Namespace], int]
"""What trains with arguments and gives the exit code."""


def flags(model: str, *, sequence: int, batch: int, steps: int, metrics: str) -> list[str]:
    """Flags of `pretrain_gpt.py` for `steps` steps of `batch` samples; the log and all files of a run are on."""
    return [
        *("--model-from-hf", model, "--load", model, "--mock-data", "--seq-length", str(sequence)),
        *("--micro-batch-size", "1", "--global-batch-size", str(batch), "--train-iters", str(steps)),
        *("--lr", str(LEARNING_RATE), "--lr-decay-style", "constant", "--weight-decay", str(DECAY)),
        *("--adam-beta1", str(BETAS[0]), "--adam-beta2", str(BETAS[1]), "--clip-grad", str(CLIP)),
        *("--hidden-dropout", "0", "--attention-dropout", "0", "--use-flash-attn", "--eval-iters", "0"),
        *("--log-interval", "1", "--metrics-dir", metrics),
    ]


@contextlib.contextmanager
def around_training(change: Callable[[Namespace, Training], int]) -> Iterator[None]:
    """Within the context, `pretrain` calls `change(args, training)` where process groups and patches exist and nothing
    is built yet, instead of `training(args)`.
    """
    from mindspeed_llm.training import pretrain

    original = pretrain._train
    with mock.patch.object(
        pretrain, "_train", lambda args, task: change(args, lambda changed: original(changed, task))
    ):
        yield


@contextlib.contextmanager
def before_each_step(act: Callable[[], None], losses: list[float]) -> Iterator[None]:
    """Within the context, the training loop calls `act` before each step, and notes its losses."""
    from mindspeed_llm.training.train_step import TrainStep

    original = TrainStep.run

    def run(step: Any, batches: list[Iterator[Batch]]) -> Any:
        act()
        result = original(step, batches)
        losses.append(result.loss)
        return result

    with mock.patch.object(TrainStep, "run", run):
        yield


def all_batches(args: Namespace) -> list[Batch]:
    """The micro batches that this rank trains on, in order, as tensors."""
    from mindspeed_llm.platform.device import current_device
    from mindspeed_llm.training.data.datasets import build_datasets
    from mindspeed_llm.training.data.iterator import train_batches
    from mindspeed_llm.training.loop import data_parallel

    rank, size = data_parallel()
    dataset = build_datasets(args).train
    batches = train_batches(dataset, args, rank=rank, size=size, consumed=0, device=current_device())
    count = args.train_iters * (args.global_batch_size // args.micro_batch_size // size)
    # The data may go on behind the last step.
    return list(itertools.islice(batches, count))


class BareLoop:
    """One step at a time of a loop over megatron-core: its DDP, optimizer and forward-backward function, and no more.

    Virtual pipeline stages are left out, and so are all settings of DDP but the distributed optimizer's.
    """

    def __init__(self, args: Namespace) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from mindspeed_llm.platform.device import current_device
        from mindspeed_llm.tasks.models.config import transformer_config
        from mindspeed_llm.tasks.models.hf_weights import load_hf_weights
        from mindspeed_llm.tasks.models.provider import build_model

        self._args = args
        config = transformer_config(args)
        model = build_model(
            args,
            config,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        load_hf_weights([model], Path(args.load), args)
        sharded = args.use_distributed_optimizer
        self._model = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded),
            module=model.to(current_device()),
        )
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=LEARNING_RATE,
                weight_decay=DECAY,
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                clip_grad=CLIP,
                use_distributed_optimizer=sharded,
            ),
            [self._model],
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        self._schedule = get_forward_backward_func()

    def step(self, batches: list[Batch]) -> float:
        """Train on micro batches; the loss per target of this rank's, NaN on a stage that has none."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = self._schedule(
            forward_step_func=_forward_step,
            data_iterator=iter(batches),
            model=self._model,
            num_microbatches=len(batches),
            seq_length=self._args.seq_length,
            micro_batch_size=self._args.micro_batch_size,
            forward_only=False,
        )
        self._optimizer.step()
        return sum(entry["loss"].item() for entry in losses) / len(losses) if losses else float("nan")


def _forward_step(batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    batch = next(batches)

    def loss(per_token: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count = (per_token * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
        return total, count.to(torch.int), {"loss": total.detach() / count}

    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), loss
