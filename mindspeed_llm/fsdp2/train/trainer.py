"""The training loop."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.manager import CheckpointManager
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.data.data_factory import DataBundle
from mindspeed_llm.fsdp2.distributed.mesh import DataMesh
from mindspeed_llm.fsdp2.models.counts import model_size
from mindspeed_llm.fsdp2.models.model_factory import BuiltModel
from mindspeed_llm.fsdp2.optim.loss_scaler import LossScaler
from mindspeed_llm.fsdp2.optim.optimizer_factory import OptimizerFactory
from mindspeed_llm.fsdp2.optim.schedule import build_schedule
from mindspeed_llm.fsdp2.train.eval_samples import build_eval_samples
from mindspeed_llm.fsdp2.train.evaluate import EvalResult, evaluate
from mindspeed_llm.fsdp2.train.exporting import export_trained
from mindspeed_llm.fsdp2.train.forward import Batch
from mindspeed_llm.fsdp2.train.preference import pair_loss
from mindspeed_llm.fsdp2.train.saving import Saver
from mindspeed_llm.fsdp2.train.step import OptimizerStep, StepResult
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.observability.recorder import RunRecorder, StepRecord
from mindspeed_llm.observability.samples_file import SamplesFile
from mindspeed_llm.observability.throughput import flops_per_token, model_flops_utilization, peak_tflops
from mindspeed_llm.platform import device as platform_device
from mindspeed_llm.platform import distributed, memory
from mindspeed_llm.platform.profiling import Profiler
from mindspeed_llm.termination import TERMINATED_EXIT_CODE, TerminationSignal

logger = get_logger(__name__)


class NonFiniteLoss(UserError):
    """The loss or the gradient norm became NaN or infinite; most often the learning rate or the data is the cause."""


@dataclass(kw_only=True)
class _Interval:
    """Sums since the last logged step."""

    started: float
    nll_sum: float = 0.0
    targets: int = 0
    tokens: int = 0
    steps: int = 0
    aux_losses: list[float] = field(default_factory=list)
    metric_sums: dict[str, float] = field(default_factory=dict)

    def as_values(self) -> dict[str, Any]:
        """Plain values for a checkpoint; `from_values` reads them. The time so far stands as a duration."""
        values = {**vars(self), "aux_losses": list(self.aux_losses), "metric_sums": dict(self.metric_sums)}
        values["elapsed"] = time.monotonic() - self.started
        del values["started"]
        return values

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> _Interval:
        values = dict(values)
        return cls(started=time.monotonic() - values.pop("elapsed"), **values)

    def add(self, result: StepResult) -> None:
        self.nll_sum += result.nll_sum
        self.targets += result.targets
        self.tokens += result.tokens
        self.steps += 1
        if result.aux_loss is not None:
            self.aux_losses.append(result.aux_loss)
        for name, value in result.metrics.items():
            self.metric_sums[name] = self.metric_sums.get(name, 0.0) + value * result.targets


class Trainer:
    """Trains a built model on a data bundle; every rank runs one.

    The order of one optimizer step is in `OptimizerStep`; this class goes through the data, evaluates, records and
    exports.
    """

    def __init__(
        self,
        config: Config,
        *,
        built: BuiltModel,
        tokenizer: PreTrainedTokenizerBase,
        data: DataBundle,
        mesh: DataMesh,
        device: torch.device,
        checkpoints: CheckpointManager | None = None,
        reference: BuiltModel | None = None,
    ) -> None:
        """`checkpoints` is None where nothing is saved; `reference` is DPO's second model, where it has one."""
        training = config.training
        self.config, self.built, self.tokenizer, self.data = config, built, tokenizer, data
        self.mesh, self.device = mesh, device
        self.total_steps = data.train.total_steps(training.num_train_epochs, training.max_steps)
        self.schedule = build_schedule(training, self.total_steps)
        self.optimizer = OptimizerFactory.create(built.model, training)
        self.scaler = LossScaler(enabled=config.parallel.param_dtype == "fp16")
        self._pairs = pair_loss(training, reference)
        self._samples = build_eval_samples(config, built.model, tokenizer, data, device=device)
        self._samples_file: SamplesFile | None = None
        self._step = OptimizerStep(
            model=built.model,
            sharded=built.sharded,
            optimizer=self.optimizer,
            mesh=mesh,
            device=device,
            config=training,
            scaler=self.scaler,
            pairs=self._pairs,
        )
        self.start_step = 0
        self.consumed_samples = 0
        self.consumed_tokens = 0
        self._interval: _Interval | None = None
        self._saver = Saver(
            training, checkpoints, samples_per_epoch=data.train.num_samples, export=self._export_save_point
        )
        self._flops_per_token, self._peak = self._throughput_constants()

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        training = self.config.training
        return training.per_device_train_batch_size * training.gradient_accumulation_steps * self.mesh.size

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Go on where a checkpoint stands; the tensors have been loaded already."""
        self.start_step = progress["step"]
        self.consumed_samples = progress["samples"]
        self.consumed_tokens = progress["tokens"]
        self.scaler.load_values(progress["loss_scaler"])
        self._interval = _Interval.from_values(progress["interval"])

    def train(self) -> list[StepResult]:
        """Run the steps that are left, evaluate, export; returns the result of every step.

        Raises:
            NonFiniteLoss: unless `training.stop_on_nonfinite_loss` is off.
            CheckpointError: a checkpoint could not be written and `training.save_error` is `stop`.
            SystemExit: with code 143 after SIGTERM, when a checkpoint has been saved.
        """
        training = self.config.training
        self._banner()
        results: list[StepResult] = []
        recorder = RunRecorder(
            Path(training.output_dir),
            total_steps=self.total_steps,
            enabled=distributed.is_rank_zero(),
            tensorboard=training.tensorboard,
            log_throughput=training.log_throughput,
            log_cpu_memory=training.log_cpu_memory,
            start_iteration=self.start_step,
        )
        self._samples_file = SamplesFile(
            Path(training.output_dir), enabled=distributed.is_rank_zero(), start_iteration=self.start_step
        )
        # `with`: the picture and the files are complete also after Ctrl-C or an error, and when torchrun sends SIGTERM
        # because another rank is gone, which is about the same moment.
        with TerminationSignal() as termination, recorder:
            if training.eval_on_start and self.start_step == 0:
                self.evaluate(recorder, iteration=0)
            self.built.model.train()
            try:
                with self._profiler() as profiler:
                    for result in self._steps(recorder, termination, profiler):
                        results.append(result)
            except KeyboardInterrupt:
                done = self.start_step + len(results)
                kept = "only checkpoints are kept" if self._saver.is_on else "nothing of it is kept"
                logger.warning(
                    "interrupted after step %d of %d: the model was not exported, %s", done, self.total_steps, kept
                )
                raise
            self._saver.wait()
            self._saver.report()
            self.evaluate(recorder, iteration=self.total_steps)
            if training.save_hf_weights:
                self.export()
            recorder.completed()
        return results

    def _steps(self, recorder: RunRecorder, termination: TerminationSignal, profiler: Profiler) -> Iterator[StepResult]:
        """Run, record, evaluate and save step by step."""
        training = self.config.training
        interval = self._interval or _Interval(started=time.monotonic())
        for iteration, micro_batches in enumerate(self._batches(), start=self.start_step + 1):
            samples_before = self.consumed_samples
            result = self._step.run(
                micro_batches,
                learning_rate=self.schedule.at(iteration - 1),
                signals=(int(termination.received), int(self._saver.failed)),
            )
            yield result
            terminated, save_failed = result.signals
            is_last = iteration == self.total_steps
            self._account(result, interval, iteration)
            if iteration % training.logging_steps == 0 or is_last:
                recorder.train_step(self._record(iteration, result, interval))
                interval = _Interval(started=time.monotonic())
            profiler.step()
            before = time.monotonic()
            if training.eval_steps and iteration % training.eval_steps == 0 and not is_last:
                self.evaluate(recorder, iteration=iteration)
                recorder.write_plot()
            if save_failed:
                self._saver.wait()
            if terminated or self._saver.is_due(
                step=iteration, is_last=is_last, samples_before=samples_before, samples_after=self.consumed_samples
            ):
                self._saver.save(
                    iteration,
                    model=self.built.model,
                    optimizer=self.optimizer,
                    progress=self._progress(iteration, interval),
                )
                recorder.write_plot()
            if terminated:
                self._saver.wait()
                self._saver.report()
                logger.warning("SIGTERM: stopped after step %d of %d", iteration, self.total_steps)
                raise SystemExit(TERMINATED_EXIT_CODE)
            interval.started += time.monotonic() - before  # evaluating and saving are no part of a step's time

    def evaluate(self, recorder: RunRecorder, *, iteration: int) -> dict[str | None, EvalResult]:
        """Evaluate on every evaluation set (none: do nothing) and record the losses, and answers to prompts."""
        results: dict[str | None, EvalResult] = {}
        for name, source in self._eval_sets().items():
            result = evaluate(self.built.model, source.batches(), device=self.device, pairs=self._pairs)
            recorder.eval(
                iteration,
                result.loss,
                result.tokens,
                result.seconds,
                name=name,
                metrics=result.metrics,
                has_perplexity=self._pairs is None,
            )
            results[name] = result
        if self._samples is not None and self._samples_file is not None:
            self._samples_file.write(iteration, self._samples.rows())
        return results

    def export(self, folder: Path | None = None) -> None:
        """Write what was trained to `folder`, by default `training.output_dir` (a collective); see `export_trained`."""
        folder = folder or Path(self.config.training.output_dir)
        export_trained(self.built, folder, training=self.config.training, tokenizer=self.tokenizer)

    def _export_save_point(self, step: int) -> None:
        self.export(Path(self.config.training.output_dir) / "hf" / f"global_step_{step}")

    def _progress(self, step: int, interval: _Interval) -> dict[str, Any]:
        """What `resume` needs; the same on every rank."""
        return {
            "step": step,
            "samples": self.consumed_samples,
            "tokens": self.consumed_tokens,
            "layouts": list(self.data.train.layouts),
            "num_samples": self.data.train.num_samples,
            "loss_scaler": self.scaler.as_values(),
            "interval": interval.as_values(),
        }

    def _batches(self) -> Iterator[list[Batch]]:
        steps_left = max(self.total_steps - self.start_step, 0)
        return itertools.islice(self.data.train.micro_batches(self.start_step), steps_left)

    def _eval_sets(self) -> Mapping[str | None, object]:
        sets = self.data.eval
        if sets is None:
            return {}
        return sets if isinstance(sets, dict) else {None: sets}

    def _account(self, result: StepResult, interval: _Interval, iteration: int) -> None:
        self.consumed_samples += result.samples
        self.consumed_tokens += result.tokens
        interval.add(result)
        if not result.targets:
            logger.warning("step %d: no sample of the global batch has a target; the step changed nothing", iteration)
            return
        overflow = self.scaler.enabled and math.isfinite(result.loss) and not result.updated
        if overflow:
            logger.warning("step %d: fp16 gradients overflowed; the step was skipped", iteration)
            return
        if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
            return
        message = f"step {iteration}: lm loss {result.loss}, grad norm {result.grad_norm}"
        if self.config.training.stop_on_nonfinite_loss:
            raise NonFiniteLoss(
                f"{message}; the weights are of no use any more. Lower training.lr, check the data, or set "
                "training.stop_on_nonfinite_loss: false to go on regardless"
            )
        logger.warning(message)

    def _record(self, iteration: int, result: StepResult, interval: _Interval) -> StepRecord:
        elapsed = time.monotonic() - interval.started
        peaks = torch.tensor([memory.max_memory_allocated_gb(), memory.max_memory_reserved_gb()])
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        tokens_per_second = interval.tokens / elapsed if elapsed > 0 else 0.0
        host = memory.host_memory() if self.config.training.log_cpu_memory else None
        return StepRecord(
            iteration=iteration,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            elapsed_ms_per_iteration=elapsed * 1000.0 / interval.steps,
            learning_rate=self.schedule.at(iteration),
            global_batch_size=self.global_batch_size,
            # Without a target there is no loss: NaN (null in metrics.jsonl), where 0 would look like a perfect model.
            lm_loss=interval.nll_sum / interval.targets if interval.targets else math.nan,
            grad_norm=result.grad_norm,
            max_memory_allocated_gb=peaks[0].item(),
            max_memory_reserved_gb=peaks[1].item(),
            tokens_per_second=tokens_per_second,
            mfu=model_flops_utilization(
                tokens_per_second=tokens_per_second,
                flops_per_token=self._flops_per_token,
                num_devices=self.mesh.size,
                peak_tflops_per_device=self._peak,
            ),
            extra={
                name: total / interval.targets if interval.targets else math.nan
                for name, total in interval.metric_sums.items()
            },
            aux_loss=sum(interval.aux_losses) / len(interval.aux_losses) if interval.aux_losses else None,
            cpu_used_memory_gb=host.used_gb if host else None,
            cpu_available_memory_gb=host.available_gb if host else None,
            cpu_memory_usage_percent=host.usage_percent if host else None,
        )

    def _throughput_constants(self) -> tuple[float, float | None]:
        size = model_size(self.built.model)
        flops = flops_per_token(
            num_params_active=size.active,
            num_layers=size.layers,
            hidden=size.hidden,
            num_heads=size.heads,
            head_dim=size.head_dim,
            seq_len=self.config.data.cutoff_len,
        )
        # Of the 6 operations per weight and token, the 2 that make its gradient fall away where it is frozen.
        flops -= 2 * size.active_frozen
        if self._pairs is not None:
            flops += 2 * size.active  # the reference's forward
        peak = self.config.training.device_peak_tflops
        if peak is None:
            peak = peak_tflops(platform_device.device_name(), self.config.parallel.param_dtype)
        return flops, peak

    def _profiler(self) -> Profiler:
        training = self.config.training
        return Profiler(
            enabled=training.profile,
            step_start=training.profile_step_start,
            step_end=training.profile_step_end,
            ranks=training.profile_ranks,
            level=training.profile_level,
            export_type=training.profile_export_type,
            data_simplification=training.profile_data_simplification,
            with_cpu=training.profile_with_cpu,
            with_stack=training.profile_with_stack,
            with_memory=training.profile_with_memory,
            record_shapes=training.profile_record_shapes,
            save_path=training.profile_save_path,
            rank=distributed.rank(),
        )

    def _banner(self) -> None:
        training = self.config.training
        if self.total_steps < 1:
            raise UserError("training.max_steps / num_train_epochs: no step to train; the data has too few samples")
        logger.info("***** Running training (FSDP2) *****")
        logger.info("  Num examples = %s", f"{self.data.train.num_samples:,}")
        epochs = self.total_steps * self.global_batch_size / self.data.train.num_samples
        logger.info("  Num Epochs = %.3g", training.num_train_epochs if training.max_steps <= 0 else epochs)
        logger.info("  Total Batch Size = %s", f"{self.global_batch_size:,}")
        logger.info("  Gradient Accumulation steps = %d", training.gradient_accumulation_steps)
        logger.info("  Total optimization steps = %s", f"{self.total_steps:,}")
        size = model_size(self.built.model)
        logger.info("  Number of parameters = %s", f"{size.total:,}")
        if size.trainable < size.total:
            share = 100 * size.trainable / size.total
            logger.info("  Number of trained parameters = %s (%.3g %%)", f"{size.trainable:,}", share)
