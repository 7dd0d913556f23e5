"""The text that a run prints: the training line with the field names, order and formats that users' scripts parse."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mindspeed_llm.observability.record import StepRecord


def format_step(
    record: StepRecord, *, total_steps: int, log_throughput: bool = False, log_cpu_memory: bool = False
) -> str:
    """One training step as a line of ` name: value | ` fields.

    `mtp loss` is always there, 0 when the model has no such loss; `mfu` (percent) only where it is known; fields of
    `record.extra` stand before the grad norm with spaces for underscores.
    """
    fields = [
        f"iteration {record.iteration:8d}/{total_steps:8d}",
        f"consumed samples: {record.consumed_samples:10d}",
        f"consumed tokens: {record.consumed_tokens:10d}",
        f"elapsed time per iteration (ms): {record.elapsed_ms_per_iteration:.2f}",
    ]
    if log_throughput:
        fields.append(f"tokens/s: {record.tokens_per_second:.2f}")
        if record.mfu is not None:
            fields.append(f"mfu: {100.0 * record.mfu:.2f}")
    fields += [
        f"learning rate: {record.learning_rate:.6E}",
        f"global batch size: {record.global_batch_size:5d}",
        f"lm loss: {record.lm_loss:.6E}",
        f"mtp loss: {0.0 if record.mtp_loss is None else record.mtp_loss:.6E}",
    ]
    if record.aux_loss is not None:
        fields.append(f"aux loss: {record.aux_loss:.6E}")
    fields += [f"{name.replace('_', ' ')}: {value:.6E}" for name, value in record.extra.items()]
    fields += [
        f"grad norm: {record.grad_norm:.3f}",
        f"max_memory_allocated(GB): {record.max_memory_allocated_gb:.2f}",
        f"max_memory_reserved(GB): {record.max_memory_reserved_gb:.2f}",
    ]
    if log_cpu_memory:
        cpu_memory = (record.cpu_used_memory_gb, record.cpu_available_memory_gb, record.cpu_memory_usage_percent)
        assert None not in cpu_memory, "log_cpu_memory needs the three cpu memory figures in the record"
        fields += [
            f"cpu_used_memory(GB): {cpu_memory[0]:.2f}",
            f"cpu_available_memory(GB): {cpu_memory[1]:.2f}",
            f"cpu_memory_usage(%): {cpu_memory[2]:.1f}",
        ]
    return "".join(f" {field} |" for field in fields) + " "


PART = "validation"
"""The part of the data that an evaluation is on, where nothing else is said."""


def format_eval(
    *,
    iteration: int,
    eval_loss: float,
    eval_tokens: int,
    elapsed_s: float,
    name: str | None = None,
    part: str = PART,
    metrics: Mapping[str, float] | None = None,
    has_perplexity: bool = True,
) -> str:
    """The line of one evaluation of a part of the data: loss, perplexity where the loss has one, number of target
    tokens, seconds, metrics.

    It says no `iteration i/n`, by which scripts find the training lines.
    """
    what = part if name is None else f"{part} {name}"
    fields = [
        f"{what} after iteration {iteration:8d}",
        f"eval loss: {eval_loss:.6E}",
        *([f"perplexity: {perplexity(eval_loss):.4f}"] if has_perplexity else []),
        f"eval tokens: {eval_tokens:10d}",
        f"elapsed time (s): {elapsed_s:.2f}",
    ]
    fields += [f"{key.replace('_', ' ')}: {value:.6E}" for key, value in (metrics or {}).items()]
    return "".join(f" {field} |" for field in fields) + " "


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def banner(
    *,
    backend: str,
    num_examples: int | str,
    num_epochs: float,
    total_batch_size: int,
    gradient_accumulation_steps: int,
    total_steps: int,
) -> list[str]:
    """The lines that announce a training run."""
    return [
        f"***** Running training ({backend}) *****",
        f"  Num examples = {num_examples}",
        f"  Num Epochs = {num_epochs:g}",
        f"  Total Batch Size = {total_batch_size}",
        f"  Gradient Accumulation steps = {gradient_accumulation_steps}",
        f"  Total optimization steps = {total_steps}",
    ]


def completed(seconds: float) -> str:
    """The line that ends a training run."""
    return f"Training completed in {seconds:.2f}s"
