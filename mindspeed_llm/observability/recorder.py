"""One object that a trainer reports to: log line, metrics.jsonl, TensorBoard, loss.png and progress bar follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_llm.observability import log_line, loss_plot, metrics_file
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.observability.metrics_file import MetricsFile
from mindspeed_llm.observability.progress import ProgressBar
from mindspeed_llm.observability.record import StepRecord
from mindspeed_llm.observability.tensorboard import FOLDER_NAME, TensorBoardWriter

__all__ = ["RunRecorder", "StepRecord"]


class RunRecorder:
    """Records a run in `output_dir`. With enabled=False (all ranks but 0) every method does nothing.

    Use it as a context manager, or call `close` in a `finally`: it draws the picture and closes the files also after
    Ctrl-C or an error.
    """

    def __init__(
        self,
        output_dir: Path | None,
        *,
        total_steps: int,
        enabled: bool,
        tensorboard: bool,
        tensorboard_dir: Path | None = None,
        log_throughput: bool,
        log_cpu_memory: bool,
        show_progress: bool | None = None,
        start_iteration: int = 0,
        format_step: Callable[..., str] = log_line.format_step,
    ) -> None:
        """Open the files.

        Args:
            output_dir: made when it is missing; None: nothing is written, there are log lines and the progress alone.
            total_steps: optimizer steps of the whole run.
            enabled: whether this process records (global rank 0).
            tensorboard: also write TensorBoard events.
            tensorboard_dir: folder for them; None: `tensorboard` in `output_dir`, where there is one.
            log_throughput: show tokens/s and MFU in the log line.
            log_cpu_memory: show the machine's memory in the log line; the records must have the figures.
            show_progress: progress bar on stderr; None: where stderr is a terminal.
            start_iteration: optimizer steps that were done before, when resuming; metrics up to there are kept.
            format_step: makes the log line of a step, as `log_line.format_step` does.
        """
        self._enabled = enabled
        if not enabled:
            return
        self._output_dir = None if output_dir is None else Path(output_dir)
        self._total_steps = total_steps
        self._log_throughput = log_throughput
        self._log_cpu_memory = log_cpu_memory
        self._format_step = format_step
        self._logger = get_logger("train")
        self._metrics = self._tensorboard = None
        if self._output_dir is not None:
            self._metrics = MetricsFile(self._output_dir / metrics_file.FILE_NAME, start_iteration=start_iteration)
            tensorboard_dir = tensorboard_dir or self._output_dir / FOLDER_NAME
        if tensorboard and tensorboard_dir is not None:
            self._tensorboard = TensorBoardWriter(tensorboard_dir, start_iteration=start_iteration)
        self._progress = ProgressBar(total_steps=total_steps, start_step=start_iteration, show=show_progress)
        self._started = time.monotonic()
        self._closed = False

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def train_step(self, record: StepRecord) -> None:
        """Record one logged step: log line, line in metrics.jsonl, TensorBoard scalars, progress."""
        if not self._enabled:
            return
        self._logger.info(
            self._format_step(
                record,
                total_steps=self._total_steps,
                log_throughput=self._log_throughput,
                log_cpu_memory=self._log_cpu_memory,
            )
        )
        self._write("train", _step_values(record))
        self._progress.update(record.iteration, loss=record.lm_loss)

    def eval(
        self,
        iteration: int,
        eval_loss: float,
        eval_tokens: int,
        elapsed_s: float,
        *,
        name: str | None = None,
        part: str = log_line.PART,
        metrics: Mapping[str, float] | None = None,
        has_perplexity: bool = True,
    ) -> None:
        """Record one evaluation: log line, line in metrics.jsonl, TensorBoard scalars.

        Args:
            iteration: optimizer steps done.
            eval_loss: mean loss per target token, in nats; or another loss, without `has_perplexity`.
            eval_tokens: number of target tokens.
            elapsed_s: seconds it took.
            name: of the evaluation set, when there are several; its keys then end in `_<name>` and the picture shows
                only sets without a name.
            part: of the data, when it is not the validation data; its keys then end in `_<part>`.
            metrics: further means over the evaluation data; their keys begin with `eval_`.
            has_perplexity: whether exp(eval_loss) is one.
        """
        if not self._enabled:
            return
        self._logger.info(
            log_line.format_eval(
                iteration=iteration,
                eval_loss=eval_loss,
                eval_tokens=eval_tokens,
                elapsed_s=elapsed_s,
                name=name,
                part=part,
                metrics=metrics,
                has_perplexity=has_perplexity,
            )
        )
        suffix = "".join(f"_{word}" for word in (part if part != log_line.PART else None, name) if word is not None)
        values = {
            "iteration": iteration,
            f"eval_loss{suffix}": eval_loss,
            f"eval_perplexity{suffix}": log_line.perplexity(eval_loss) if has_perplexity else None,
            f"eval_tokens{suffix}": eval_tokens,
            f"eval_seconds{suffix}": elapsed_s,
        } | {f"eval_{key}{suffix}": value for key, value in (metrics or {}).items()}
        self._write("eval", values)

    def write_plot(self) -> Path | None:
        """Draw loss.png from metrics.jsonl, the steps before a resume included; None where nothing is written."""
        if not self._enabled or self._metrics is None or self._output_dir is None:
            return None
        records = metrics_file.read_metrics(self._metrics.path)
        train = [record for record in records if "lm_loss" in record]
        evaluations = [record for record in records if "eval_loss" in record]
        path = self._output_dir / loss_plot.FILE_NAME
        loss_plot.write_loss_plot(
            path,
            iterations=[record["iteration"] for record in train],
            losses=[record["lm_loss"] for record in train],
            eval_iterations=[record["iteration"] for record in evaluations],
            eval_losses=[record["eval_loss"] for record in evaluations],
        )
        return path

    def completed(self) -> None:
        """Log that the run has reached its end, with the seconds since the recorder was made."""
        if self._enabled:
            self._logger.info(log_line.completed(time.monotonic() - self._started))

    def close(self) -> None:
        """Draw loss.png and close all files. Safe to call twice, and after an interruption at any point."""
        if not self._enabled or self._closed:
            return
        self._closed = True
        self._progress.close()
        if self._metrics is not None:
            self._metrics.close()
        try:
            self.write_plot()
        finally:
            if self._tensorboard is not None:
                self._tensorboard.close()

    def _write(self, group: str, values: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(values)
        if self._tensorboard is not None:
            self._tensorboard.write(group, values)


def _step_values(record: StepRecord) -> dict[str, Any]:
    """The line of metrics.jsonl that a record makes: its fields and its extras side by side."""
    values = {name: value for name, value in vars(record).items() if name != "extra"}
    clash = values.keys() & record.extra.keys()
    assert not clash, f"extra figures must not be called as fields of the record: {sorted(clash)}"
    return values | record.extra
