"""The training line of the Megatron backend, with the field names, order and formats that users' scripts parse."""

from __future__ import annotations

import time

from mindspeed_llm.observability.record import StepRecord

# Figures of a record's `extra` that have places of their own in the line.
LOSS_SCALE, SKIPPED, NAN, THROUGHPUT = (
    "loss_scale",
    "skipped_iterations",
    "nan_iterations",
    "throughput_tflops_per_device",
)
_REWARDS = "rewards_"
_OWN = (LOSS_SCALE, SKIPPED, NAN, THROUGHPUT, "num_zeros", "params_norm")


def format_megatron_step(
    record: StepRecord, *, total_steps: int, log_throughput: bool = False, log_cpu_memory: bool = False
) -> str:
    """One training step as a line of ` name: value |` fields.

    Losses that are not above zero are left out, as ever, rewards are not; `extra` holds the loss scale, and how many
    iterations were skipped and how many had a loss that is no number.
    """
    extra = record.extra
    fields = [
        f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {record.iteration:8d}/{total_steps:8d}",
        f"consumed samples: {record.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {record.elapsed_ms_per_iteration:.1f}",
    ]
    if log_throughput and THROUGHPUT in extra:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {extra[THROUGHPUT]:.1f}")
    fields += [
        f"learning rate: {record.learning_rate:.6E}",
        f"global batch size: {record.global_batch_size:5d}",
    ]
    losses = {"lm loss": record.lm_loss, "mtp loss": record.mtp_loss, "load_balancing_loss": record.aux_loss}
    rewards = {name: value for name, value in extra.items() if name.startswith(_REWARDS)}
    losses |= {name.replace("_", " "): extra[name] for name in extra if name not in _OWN and name not in rewards}
    # Not `> 0` alone: a loss that is no number must be seen.
    fields += [f"{name}: {value:.6E}" for name, value in losses.items() if value is not None and not value <= 0.0]
    fields += [f"{name.replace('_', ' ')}: {value:.6E}" for name, value in rewards.items()]
    fields += [f"loss scale: {extra.get(LOSS_SCALE, 1.0):.1f}", f"grad norm: {record.grad_norm:.3f}"]
    if "num_zeros" in extra:
        fields.append(f"num zeros: {extra['num_zeros']:.1f}")
    if "params_norm" in extra:
        fields.append(f"params norm: {extra['params_norm']:.3f}")
    fields += [
        f"number of skipped iterations: {int(extra.get(SKIPPED, 0)):3d}",
        f"number of nan iterations: {int(extra.get(NAN, 0)):3d}",
    ]
    if log_cpu_memory and record.cpu_used_memory_gb is not None:
        fields.append(f"cpu_used_memory(GB): {record.cpu_used_memory_gb:.2f}")
    return "".join(f" {field} |" for field in fields)
