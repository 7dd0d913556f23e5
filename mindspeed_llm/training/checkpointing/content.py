"""What a checkpoint of either format says besides tensors: how far the run was, under Megatron's names and ours."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.checkpoints.files import DamagedCheckpoint
from mindspeed_llm.errors import UserError
from mindspeed_llm.training.checkpointing.saved_args import plain_args
from mindspeed_llm.training.state import TrainState

CHECKPOINT_VERSION = 3.0
OURS = "mindspeed_llm"
OPTIMIZER, SCHEDULER, RNG = "optimizer", "opt_param_scheduler", "rng_state"
_OPERATIONS = "num_floating_point_operations_so_far"


def common_content(args: Namespace, state: TrainState, *, optimizer_kind: str, steps: int | None) -> dict[str, Any]:
    """The entries that are alike on all ranks. Megatron looks for the counters of samples in the arguments."""
    counters = asdict(state)
    # Of the folder and not of the run.
    del counters["last_checkpoint"]
    return {
        "args": plain_args(
            args,
            iteration=state.iteration,
            consumed_train_samples=state.consumed_train_samples,
            consumed_valid_samples=state.consumed_valid_samples,
            skipped_train_samples=0,
        ),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.iteration,
        _OPERATIONS: state.floating_point_operations,
        OURS: {"state": counters, "optimizer": optimizer_kind, "optimizer_steps": steps},
    }


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run takes from a checkpoint besides weights."""

    optimizer: bool
    rng: bool
    position: bool
    """Go on at its iteration; otherwise start at step 0."""


def wanted(args: Namespace, content: Mapping[str, Any], folder: Path, *, is_release: bool) -> Wanted:
    """What to take from a checkpoint, by the flags and by what it holds.

    Raises:
        UserError: it lacks something that the flags do not leave out.
    """
    if args.finetune or is_release:
        return Wanted(optimizer=False, rng=False, position=False)
    is_training = is_of_a_run(content)
    lacking = []
    if not args.no_load_optim and (OPTIMIZER not in content or SCHEDULER not in content):
        lacking.append(("the optimizer's state", "--no-load-optim"))
    if not args.no_load_rng and RNG not in content:
        lacking.append(("the state of random numbers", "--no-load-rng"))
    if lacking:
        what, flags = (" and ".join(words) for words in zip(*lacking, strict=True))
        kind = "" if is_training else ", as a conversion writes it; training starts at step 0 then"
        raise UserError(
            f"--load {folder}: holds weights, but not {what}; give {flags} to go without{kind}; or --finetune to take "
            "weights only and start at step 0"
        )
    return Wanted(optimizer=not args.no_load_optim, rng=not args.no_load_rng, position=is_training)


def is_of_a_run(content: Mapping[str, Any]) -> bool:
    """Whether training wrote a checkpoint, and not a conversion."""
    return OURS in content or _OPERATIONS in content or SCHEDULER in content


def arguments_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments that a checkpoint carries; empty where it carries none."""
    found = content.get("args")
    return vars(found) if hasattr(found, "__dict__") else {}


def ours(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """What this program wrote for itself; empty in checkpoints of others."""
    found = content.get(OURS)
    return found if isinstance(found, Mapping) else {}


def train_state(content: Mapping[str, Any], args: Namespace, folder: Path) -> TrainState:
    """How far the run was.

    Raises:
        DamagedCheckpoint: a counter is no number.
    """
    found = ours(content).get("state")
    if found is None:
        saved, iteration = arguments_of(content), content.get("iteration")
        # Megatron's own rule for checkpoints that do not count samples.
        samples = saved.get("consumed_train_samples") or (iteration or 0) * args.global_batch_size
        found = {
            "iteration": iteration,
            "consumed_train_samples": samples,
            "consumed_valid_samples": saved.get("consumed_valid_samples") or 0,
            "floating_point_operations": float(content.get(_OPERATIONS) or 0.0),
        }
    if not isinstance(found, Mapping):
        raise DamagedCheckpoint(f"{folder}: the counters of the run are a {type(found).__name__}")
    found = {**found, "data_layouts": tuple(found.get("data_layouts", ()))}
    try:
        state = TrainState(**found)
    except TypeError as error:
        raise DamagedCheckpoint(f"{folder}: the counters of the run are not those of this version ({error})") from error
    for name, value in asdict(state).items():
        if name == "last_checkpoint" or (name == "consumed_tokens" and value is None):
            continue
        numbers = value if name == "data_layouts" else (value,)
        if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
            raise DamagedCheckpoint(f"{folder}: {name} is {value!r}, expected a number")
    return state
