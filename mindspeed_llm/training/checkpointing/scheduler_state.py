"""The schedule of learning rate and weight decay of a resumed run: its own flags, or what the checkpoint says."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mindspeed_llm.errors import UserError

# Name in megatron-core's state: the flags that it follows from.
_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters or --lr-warmup-fraction",
    "lr_decay_steps": "--lr-decay-iters or --train-iters",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--start-weight-decay or --weight-decay",
    "end_wd": "--end-weight-decay or --weight-decay",
    "wd_incr_style": "--weight-decay-incr-style",
    "wd_incr_steps": "--train-iters",
}
_COUNTS_OF_SAMPLES = ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
_OLD_NAMES = {
    "max_lr": ("start_lr",),
    "lr_warmup_steps": ("warmup_iter", "warmup_steps"),
    "lr_decay_steps": ("end_iter", "decay_steps"),
    "lr_decay_style": ("decay_style",),
    "num_steps": ("num_iters",),
}


def restore(scheduler: OptimizerParamScheduler, saved: Mapping[str, Any], args: Namespace, where: str) -> None:
    """Go on where the schedule stood.

    Where it was another one, `--override-opt_param-scheduler` takes this run's and
    `--use-checkpoint-opt_param-scheduler` the checkpoint's, as in Megatron; without either it is an error, unless the
    values that differ have no effect.

    Raises:
        UserError: names flags and values.
    """
    before = {name: _get(saved, name) for name in (*_FLAGS, "num_steps")}
    now = {name: getattr(scheduler, name) for name in _FLAGS}
    differing = [
        name
        for name in _FLAGS
        if before[name] is not None and before[name] != now[name] and not _is_idle(name, now, before)
    ]
    if differing and not args.override_opt_param_scheduler:
        if not args.use_checkpoint_opt_param_scheduler:
            raise UserError(_conflict(differing, now, before, args, where))
        for name in differing:
            setattr(scheduler, name, before[name])
    set_steps(scheduler, int(before["num_steps"]))


def set_steps(scheduler: OptimizerParamScheduler, num_steps: int) -> None:
    """Put the schedule where it stands after `num_steps` samples."""
    for group in scheduler.optimizer.param_groups:
        # A group's own limits win over the scheduler's.
        times = group.get("lr_mult", 1.0)
        group["max_lr"], group["min_lr"] = scheduler.max_lr * times, scheduler.min_lr * times
    scheduler.num_steps = num_steps
    scheduler.step(increment=0)


def _get(saved: Mapping[str, Any], name: str) -> Any:
    return next((saved[key] for key in (name, *_OLD_NAMES.get(name, ())) if key in saved), None)


def _is_idle(name: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether a value makes no difference: the rest of the schedule does not use it."""
    if name in ("min_lr", "lr_decay_steps"):
        return now["lr_decay_style"] == before["lr_decay_style"] == "constant"
    if name == "wd_incr_steps":
        return all(values["start_wd"] == values["end_wd"] for values in (now, before))
    return False


def _conflict(
    differing: list[str], now: Mapping[str, Any], before: Mapping[str, Any], args: Namespace, where: str
) -> str:
    parts = []
    for name in differing:
        counts = name in _COUNTS_OF_SAMPLES
        new, old = ((value / args.global_batch_size) if counts else value for value in (now[name], before[name]))
        shown = [f"{value:g}" if isinstance(value, int | float) else value for value in (new, old)]
        parts.append(f"{_FLAGS[name]}: {shown[0]} instead of {shown[1]}{' steps' if counts else ''}")
    return (
        f"--load {where}: the checkpoint was written under another schedule ({'; '.join(parts)}). Set the flags as "
        "they were, or give --override-opt_param-scheduler to go on with these, or "
        "--use-checkpoint-opt_param-scheduler to go on with the checkpoint's"
    )
