"""A run on the Megatron backend, from its arguments to its last checkpoint."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from mindspeed_llm.checkpoints.run_lock import run_lock
from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.observability.log_line import banner
from mindspeed_llm.observability.megatron_line import format_megatron_step
from mindspeed_llm.observability.recorder import RunRecorder
from mindspeed_llm.observability.samples_file import SamplesFile
from mindspeed_llm.platform import distributed
from mindspeed_llm.platform.device import current_device
from mindspeed_llm.termination import TERMINATED_EXIT_CODE
from mindspeed_llm.training.folders import check_folders, hf_directory
from mindspeed_llm.training.initialize import initialize, shutdown
from mindspeed_llm.training.task import Pretraining, Task

logger = get_logger(__name__)


def pretrain(args: Namespace, task: Task | None = None) -> int:
    """Train, and return the exit code: 0, or 143 after SIGTERM.

    Args:
        args: validated arguments, see `training.arguments`.
        task: what is trained on and for; None: pretraining.

    Raises:
        UserError: paths, data or weights that do not fit; the loss is no number.
    """
    task = task or Pretraining()
    check_folders(args)
    task.check_data(args)
    features = FeaturesManager(FEATURES)
    initialize(args)
    try:
        features.apply(args)
        with _alone(args):
            return _train(args, task)
    finally:
        features.undo()
        shutdown()


def _train(args: Namespace, task: Task) -> int:
    # After `initialize`: these import megatron-core, which looks for a device when it is imported.
    from mindspeed_llm.training.checkpointing import check_adapter_export, load_checkpoint, save_checkpoint
    from mindspeed_llm.training.data.batches import Batch
    from mindspeed_llm.training.data.datasets import Progress, Samples
    from mindspeed_llm.training.data.iterator import consumed_valid_samples, eval_batches, train_batches
    from mindspeed_llm.training.eval_samples import build_eval_samples
    from mindspeed_llm.training.flops import flops_per_sample
    from mindspeed_llm.training.loop import TrainLoop, data_parallel
    from mindspeed_llm.training.profiler import profiler_of
    from mindspeed_llm.training.run_files import write_run_files
    from mindspeed_llm.training.setup import build_training_model
    from mindspeed_llm.training.state import TrainState

    folder = args.metrics_dir or args.save
    weights = hf_directory(args)
    model = build_training_model(args, hf_weights=weights)
    goes_on = (args.load and weights is None) or args.lora_load
    state = (load_checkpoint(args, model) if goes_on else None) or TrainState()
    if args.save_lora_to_hf:
        check_adapter_export(args, model)
    progress = None
    if state.iteration:
        progress = Progress(
            iteration=state.iteration, consumed_samples=state.consumed_train_samples, layouts=state.data_layouts
        )
    data = task.build_datasets(args, progress)
    state = replace(state, data_layouts=data.layouts)
    rank, size = data_parallel()

    def for_chunks(make: Callable[..., Iterator[Batch]], dataset: Samples | None, consumed: int) -> list[Iterator]:
        """The same batches for each chunk of this rank; none where there are no data."""
        if dataset is None:
            return []
        return [
            make(dataset, args, rank=rank, size=size, consumed=consumed, device=current_device()) for _ in model.chunks
        ]

    asked = build_eval_samples(args, model, data)
    consumed_valid = state.consumed_valid_samples or consumed_valid_samples(args, state.iteration)
    _announce(args, data.epoch, len(data.train.rows))
    if folder and distributed.is_rank_zero():
        write_run_files(Path(folder), args)
    recorder = RunRecorder(
        Path(folder) if folder else None,
        total_steps=args.train_iters,
        enabled=distributed.is_rank_zero(),
        tensorboard=True,
        tensorboard_dir=Path(args.tensorboard_dir) if args.tensorboard_dir else None,
        log_throughput=args.log_throughput,
        log_cpu_memory=False,
        start_iteration=state.iteration,
        format_step=format_megatron_step,
    )
    answers = SamplesFile(
        Path(folder) if folder else None, enabled=distributed.is_rank_zero(), start_iteration=state.iteration
    )
    with recorder, profiler_of(args, state.iteration) as profiler:
        loop = TrainLoop(
            args,
            model,
            state,
            batches=for_chunks(train_batches, data.train, state.consumed_train_samples),
            valid_batches=for_chunks(eval_batches, data.valid, consumed_valid),
            test_batches=for_chunks(eval_batches, data.test, 0),
            recorder=recorder,
            samples=None if asked is None else (asked, answers),
            profiler=profiler,
            save=(lambda now: save_checkpoint(args, model, now)) if args.save else None,
            flops_per_sample=flops_per_sample(args),
            objective=task.objective(args, model, progress),
        )
        reason = loop.train()
        if reason == "terminated":
            logger.warning("SIGTERM: stopped after step %d of %d", state.iteration, args.train_iters)
            return TERMINATED_EXIT_CODE
        if reason != "done":
            logger.info("stopped after step %d of %d (%s)", state.iteration, args.train_iters, reason)
            return 0
        loop.evaluate()
        loop.test()
        recorder.completed()
    return 0


@contextlib.contextmanager
def _alone(args: Namespace) -> Iterator[None]:
    """No other run writes to the folders of this one meanwhile."""
    with contextlib.ExitStack() as locks:
        taken: set[Path] = set()
        for name in ("save", "metrics_dir"):
            folder = getattr(args, name)
            if folder is not None and (path := Path(folder).resolve()) not in taken:
                taken.add(path)
                locks.enter_context(run_lock(Path(folder), f"--{name.replace('_', '-')}"))
        yield


def _announce(args: Namespace, epoch: int | None, laid_out: int) -> None:
    taken = args.train_iters * args.global_batch_size
    for line in banner(
        backend="Megatron",
        num_examples=epoch or laid_out,
        num_epochs=round(taken / epoch, 2) if epoch else 1,
        total_batch_size=args.global_batch_size,
        gradient_accumulation_steps=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        total_steps=args.train_iters,
    ):
        logger.info(line)
