"""The training loop of the Megatron backend: steps, log, evaluation, checkpoints, and when to stop."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.observability.log_line import PART
from mindspeed_llm.observability.record import StepRecord
from mindspeed_llm.observability.recorder import RunRecorder
from mindspeed_llm.observability.samples_file import SamplesFile
from mindspeed_llm.platform import memory
from mindspeed_llm.platform.device import current_device
from mindspeed_llm.platform.profiling import Profiler
from mindspeed_llm.tasks.inference.eval_samples import EvalSamples
from mindspeed_llm.termination import TerminationSignal
from mindspeed_llm.training.garbage import GarbageCollection
from mindspeed_llm.training.moe_losses import MoeLosses
from mindspeed_llm.training.objective import Batch, NextToken, Objective
from mindspeed_llm.training.params_norm import params_norm
from mindspeed_llm.training.setup import TrainingModel
from mindspeed_llm.training.state import TrainState
from mindspeed_llm.training.train_step import StepResult, TrainStep

logger = get_logger(__name__)
Save = Callable[[TrainState], None]


class NonFiniteLoss(UserError):
    """The loss, or the norm of the gradients, is infinite or no number."""


@dataclass
class _Interval:
    """What has been gathered since the last logged step."""

    started: float = field(default_factory=time.monotonic)
    nll_sum: float = 0.0
    targets: int = 0
    tokens: int = 0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    steps: int = 0
    skipped: int = 0
    not_finite: int = 0


class TrainLoop:
    """Runs the steps of a run that are left.

    `train` returns why it ended: "done", "terminated", "time" or "interval".
    """

    def __init__(
        self,
        args: Namespace,
        model: TrainingModel,
        state: TrainState,
        *,
        batches: list[Iterator[Batch]],
        valid_batches: list[Iterator[Batch]],
        test_batches: list[Iterator[Batch]],
        recorder: RunRecorder,
        samples: tuple[EvalSamples, SamplesFile] | None = None,
        profiler: Profiler,
        save: Save | None,
        flops_per_sample: float,
        objective: Objective | None = None,
    ) -> None:
        """
        Args:
            batches: per chunk of this rank, micro batches from `state.consumed_train_samples` on.
            valid_batches: the same for evaluation, endless; empty: no evaluation.
            test_batches: the same for the one evaluation on the test data.
            samples: what is asked at each evaluation, and where the answers go; None: nothing is asked.
            save: writes a checkpoint (a collective); None: nothing is saved.
            flops_per_sample: of forward and backward, over all ranks.
            objective: what is minimised; None: `NextToken`.
        """
        self._args, self._model, self.state = args, model, state
        self._batches, self._valid_batches, self._test_batches = batches, valid_batches, test_batches
        self._recorder, self._profiler, self._save = recorder, profiler, save
        self._samples = samples
        self._flops_per_sample = flops_per_sample
        objective = objective or NextToken()
        self._step, self._has_perplexity = TrainStep(model, args, objective), objective.is_likelihood
        if state.consumed_tokens is None:
            # As if every row were full.
            state.consumed_tokens = state.consumed_train_samples * args.seq_length * objective.rows_per_sample
        self._moe_losses = MoeLosses(args)
        self._started = time.monotonic()
        self._interval = _Interval()
        self._garbage = GarbageCollection(args)

    def train(self) -> str:
        """Run to the end, or until the run is told to stop.

        Raises:
            NonFiniteLoss: unless `--no-check-for-nan-in-loss-and-grad`.
        """
        args, state = self._args, self.state
        with TerminationSignal() as termination, self._garbage:
            while state.iteration < args.train_iters:
                result = self._step.run(self._batches)
                self._account(result)
                is_last = state.iteration == args.train_iters
                if state.iteration % args.log_interval == 0 or is_last:
                    self._record(result)
                self._profiler.step()
                self._garbage.step(state.iteration)
                before = time.monotonic()
                if args.eval_interval and state.iteration % args.eval_interval == 0 and not is_last:
                    self.evaluate()
                reason = self._why_stop(termination.received)
                due = args.save_interval and state.iteration % args.save_interval == 0
                if self._save is not None and (due or is_last or reason):
                    self._save(state)
                # Evaluating and saving are no part of a step's time.
                self._interval.started += time.monotonic() - before
                if reason and not is_last:
                    return reason
        return "done"

    def evaluate(self) -> None:
        """The loss on `--eval-iters` global batches of the validation data, and answers to prompts, where there are
        any.
        """
        if self._valid_batches and self._args.eval_iters:
            self._evaluate(self._valid_batches)
            if self._samples is not None:
                asked, file = self._samples
                file.write(self.state.iteration, asked.rows())
            self.state.consumed_valid_samples += self._args.eval_iters * self._args.global_batch_size

    def test(self) -> None:
        """The loss on `--eval-iters` global batches of the test data, where there are any."""
        if self._test_batches and self._args.eval_iters:
            self._evaluate(self._test_batches, part="test")

    def _evaluate(self, batches: list[Iterator[Batch]], *, part: str = PART) -> None:
        started = time.monotonic()
        with self._garbage.evaluation():
            result = self._step.evaluate(batches, count=self._args.eval_iters * get_num_microbatches())
        self._recorder.eval(
            self.state.iteration,
            result.loss,
            result.targets,
            time.monotonic() - started,
            part=part,
            metrics=_means(result.metrics),
            has_perplexity=self._has_perplexity,
        )

    def _account(self, result: StepResult) -> None:
        state, interval = self.state, self._interval
        state.iteration += 1
        state.consumed_train_samples += self._args.global_batch_size
        assert state.consumed_tokens is not None, "set when the loop is made"
        state.consumed_tokens += result.tokens
        interval.tokens += result.tokens
        state.floating_point_operations += self._args.global_batch_size * self._flops_per_sample
        interval.steps += 1
        if not result.updated:
            state.skipped_iterations += 1
            interval.skipped += 1
            logger.warning("step %d: fp16 gradients overflowed; the step was skipped", state.iteration)
            return
        if not result.targets:
            logger.warning("step %d: no sample of the global batch has a target", state.iteration)
            return
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            interval.nll_sum += result.nll_sum
            interval.targets += result.targets
            for name, (total, count) in result.metrics.items():
                before = interval.metrics.get(name, (0.0, 0.0))
                interval.metrics[name] = before[0] + total, before[1] + count
            return
        interval.not_finite += 1
        message = f"step {state.iteration}: lm loss {result.loss}, grad norm {result.grad_norm}"
        if self._args.check_for_nan_in_loss_and_grad:
            raise NonFiniteLoss(
                f"{message}; the weights are of no use any more. Lower --lr, check the data, or give "
                "--no-check-for-nan-in-loss-and-grad to go on regardless"
            )
        logger.warning(message)

    def _record(self, result: StepResult) -> None:
        args, state, interval = self._args, self.state, self._interval
        elapsed = time.monotonic() - interval.started
        peaks = torch.tensor(
            [memory.max_memory_allocated_gb(), memory.max_memory_reserved_gb()], device=current_device()
        )
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        allocated, reserved = peaks.tolist()
        extra: dict[str, Any] = {
            "loss_scale": float(self._model.optimizer.get_loss_scale()),
            "skipped_iterations": interval.skipped,
            "nan_iterations": interval.not_finite,
            "throughput_tflops_per_device": interval.steps
            * args.global_batch_size
            * self._flops_per_sample
            / elapsed
            / dist.get_world_size()
            / 1e12,
        }
        if result.num_zeros is not None:
            extra["num_zeros"] = result.num_zeros
        if args.log_params_norm:
            extra["params_norm"] = params_norm(self._model)
        losses = self._moe_losses.take(interval.steps)
        aux_loss = losses.pop("load_balancing_loss", None)
        self._recorder.train_step(
            StepRecord(
                iteration=state.iteration,
                consumed_samples=state.consumed_train_samples,
                consumed_tokens=state.consumed_tokens or 0,
                elapsed_ms_per_iteration=1000 * elapsed / interval.steps,
                learning_rate=self._learning_rate(),
                global_batch_size=args.global_batch_size,
                lm_loss=interval.nll_sum / interval.targets if interval.targets else math.nan,
                grad_norm=result.grad_norm,
                max_memory_allocated_gb=allocated,
                max_memory_reserved_gb=reserved,
                tokens_per_second=interval.tokens / elapsed,
                aux_loss=aux_loss,
                extra=extra | losses | _means(interval.metrics),
            )
        )
        self._interval = _Interval()

    def _learning_rate(self) -> float:
        rate = get_canonical_lr_for_logging(self._model.optimizer.param_groups)
        return 0.0 if rate is None else float(rate)

    def _why_stop(self, terminated: bool) -> str:
        """Why the run stops here, decided by all ranks together; empty where it goes on."""
        args = self._args
        late = False
        if args.exit_duration_in_mins:
            late = time.monotonic() - self._started > 60 * args.exit_duration_in_mins
        flags = torch.tensor([int(terminated), int(late)], dtype=torch.int32, device=current_device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        terminated, late = (bool(flag) for flag in flags.tolist())
        if terminated:
            return "terminated"
        if late:
            return "time"
        return "interval" if args.exit_interval and self.state.iteration % args.exit_interval == 0 else ""


def _means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    return {name: total / count if count else math.nan for name, (total, count) in sums.items()}


def data_parallel() -> tuple[int, int]:
    """(rank, number of ranks) of this process among those that train on different samples."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
