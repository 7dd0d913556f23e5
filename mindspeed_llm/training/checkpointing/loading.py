"""Loading a checkpoint of the Megatron backend."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from mindspeed_llm.checkpoints.dcp_reader import read_metadata
from mindspeed_llm.checkpoints.files import DamagedCheckpoint
from mindspeed_llm.checkpoints.storage import Storage, open_storage_for_reading
from mindspeed_llm.core.shared_master import masters_in_fp32
from mindspeed_llm.errors import UserError
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.tasks.checkpoint.torch_file import StoredTensor
from mindspeed_llm.training.checkpointing import (
    content as contents,
)
from mindspeed_llm.training.checkpointing import (
    optimizer_state,
    rank_files,
    rng,
    scheduler_state,
    sharded_reading,
)
from mindspeed_llm.training.checkpointing.choose import Chosen, choose
from mindspeed_llm.training.checkpointing.layout import TORCH
from mindspeed_llm.training.checkpointing.lock import locked
from mindspeed_llm.training.checkpointing.model_part import Part
from mindspeed_llm.training.checkpointing.publishing import finish_interrupted, is_left_unfinished
from mindspeed_llm.training.checkpointing.saved_args import check_structure, check_topology
from mindspeed_llm.training.setup import TrainingModel
from mindspeed_llm.training.state import TrainState

logger = get_logger(__name__)


def load_checkpoint(args: Namespace, model: TrainingModel) -> TrainState | None:
    """Load the checkpoint of `args.load` into the model, its optimizer and scheduler, and the random numbers (a
    collective). None where there is none.

    Raises:
        UserError: on all ranks; it belongs to another model or topology, or there is none,
            in a folder other than that of `--save` or with `--exit-on-missing-checkpoint`.
        CheckpointError: on all ranks; it is damaged, or asks for something to be executed.
    """
    found = open_checkpoint(args)
    if found is None:
        return None
    if Part.ADAPTERS in parts_in(found):
        saved = contents.arguments_of(found.content)
        flags = f"--lora-target-modules {' '.join(saved.get('lora_target_modules') or ['NAME...'])}"
        for name in ("lora_r", "lora_alpha"):
            flags += f" --{name.replace('_', '-')} {saved[name]:g}" if saved.get(name) is not None else ""
        raise UserError(
            f"--load {found.chosen.folder} is the checkpoint of a LoRA run; give {flags} to go on, or merge its "
            "adapters into the model with convert_ckpt_v2.py"
        )
    return load_opened(found, args, model)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint that fits the run, of which no tensor has been read."""

    chosen: Chosen
    content: Mapping[str, Any]
    """What this rank's file says."""
    storage: Storage
    is_own: bool
    """It lies in the folder of `--save`."""


def open_checkpoint(args: Namespace) -> Opened | None:
    """Find the checkpoint of `args.load`, and compare it with the arguments (a collective); None where there is none.

    Raises:
        UserError, CheckpointError: see `load_checkpoint`.
    """
    folder = Path(args.load)
    assert dist.group.WORLD is not None
    storage = open_storage_for_reading(folder, dist.group.WORLD)
    is_own = args.save is not None and Path(args.save).resolve() == folder.resolve()
    if is_own and any(storage.gather(is_left_unfinished(folder))):
        with locked(folder, storage):
            storage.leaders_only(f"putting {folder} in order", lambda: finish_interrupted(folder))
    chosen = choose(args, storage)
    if chosen is None:
        if args.exit_on_missing_checkpoint or not is_own:
            raise UserError(
                f"--load {folder} holds no checkpoint; correct the path, or leave --load out to start from initial "
                "weights (where --save names the same folder, a run without --exit-on-missing-checkpoint does so)"
            )
        logger.warning("--load %s holds no checkpoint: training starts from initial weights", folder)
        return None
    return open_chosen(chosen, args, storage, is_own=is_own)


def open_chosen(chosen: Chosen, args: Namespace, storage: Storage, *, is_own: bool = False) -> Opened:
    """Compare a checkpoint that was found with the arguments (a collective).

    Raises:
        UserError, CheckpointError: see `load_checkpoint`.
    """
    content = storage.together(f"loading {chosen.folder}", lambda: _read(chosen, args))
    return Opened(chosen=chosen, content=content, storage=storage, is_own=is_own)


def load_opened(found: Opened, args: Namespace, model: TrainingModel, part: Part = Part.ALL) -> TrainState:
    """Load a checkpoint that is open (a collective).

    Args:
        part: of the model that is loaded.

    Raises:
        UserError, CheckpointError: see `load_checkpoint`.
    """
    with masters_in_fp32(model.optimizer, changed=True):
        state = _load(found.chosen, found.content, args, model, found.storage, part)
    if found.is_own and state.iteration:
        state.last_checkpoint = state.iteration
    _report(found.chosen, state)
    return state


@dataclass(frozen=True)
class _WeightsAlone:
    """What stands for a `TrainingModel` where nothing but weights is read."""

    modules: Sequence[nn.Module]


def load_weights(args: Namespace, modules: Sequence[nn.Module]) -> None:
    """Fill a model that is not trained with the weights of the checkpoint of `args.load` (a collective).

    Args:
        args: those of the run, with `load` and `ckpt_step` saying which checkpoint, and no `save`.
        modules: the chunks of this rank, without wrappers.

    Raises:
        UserError, CheckpointError: see `load_checkpoint`.
    """
    found = open_checkpoint(args)
    assert found is not None, "without --save a folder without checkpoints is an error"
    load_opened_weights(found, args, modules)


def load_opened_weights(found: Opened, args: Namespace, modules: Sequence[nn.Module], part: Part = Part.ALL) -> None:
    """Fill a model that is not trained, or a part of it, from a checkpoint that is open (a collective).

    Raises:
        UserError, CheckpointError: see `load_checkpoint`.
    """
    folder, model = found.chosen.folder, cast(TrainingModel, _WeightsAlone(modules))
    _say_differences(found.content, args, folder, goes_on=False)
    if found.chosen.ckpt_format == TORCH:
        path = folder / rank_files.own_folder(args) / rank_files.RANK_FILE
        found.storage.together(f"loading {folder}", lambda: rank_files.load_model(found.content, model, path, part))
    else:
        sharded_reading.load(folder, found.content, model, found.storage, optimizer=False, random=False, part=part)


def _read(chosen: Chosen, args: Namespace) -> Mapping[str, Any]:
    """What this rank's file says, compared with the arguments."""
    if chosen.ckpt_format == TORCH:
        # Before files are looked for, which carry the numbers of ranks in their names.
        any_file = sorted(chosen.folder.glob(f"mp_rank_*/{rank_files.RANK_FILE}"))
        first = rank_files.read_torch_file(any_file[0]) if any_file else {}
        saved = contents.arguments_of(first) if isinstance(first, Mapping) else {}
    else:
        content = sharded_reading.read_content(chosen.folder)
        saved = contents.arguments_of(content)
    check_structure(saved, args, chosen.folder)
    if chosen.ckpt_format == TORCH:
        check_topology(saved, args, chosen.folder)
        content = rank_files.read_content(chosen.folder, args)
    if chosen.iteration is not None and content.get("iteration") != chosen.iteration:
        raise DamagedCheckpoint(f"{chosen.folder} holds the state of step {content.get('iteration')!r}")
    return content


def _say_differences(content: Mapping[str, Any], args: Namespace, folder: Path, *, goes_on: bool) -> None:
    """Log what is other than it was with the checkpoint; which sample has which number counts where a run goes on."""
    with_position = Namespace(**{**vars(args), "finetune": not goes_on})
    if notice := check_structure(contents.arguments_of(content), with_position, folder):
        logger.warning(notice)


def _load(
    chosen: Chosen,
    content: Mapping[str, Any],
    args: Namespace,
    model: TrainingModel,
    storage: Storage,
    part: Part,
) -> TrainState:
    folder, optimizer = chosen.folder, model.optimizer

    def prepare() -> tuple[contents.Wanted, TrainState]:
        want = contents.wanted(args, content, folder, is_release=chosen.iteration is None)
        state = contents.train_state(content, args, folder) if want.position else TrainState()
        _say_differences(content, args, folder, goes_on=want.position)
        if want.optimizer and chosen.ckpt_format == TORCH:
            _check_optimizer(content, model, folder)
        return want, state

    want, state = storage.together(f"loading {folder}", prepare)
    settings = optimizer_state.keep_settings(optimizer)
    if want.optimizer:
        optimizer_state.allocate(optimizer)
    random: Mapping[str, Any] | None
    if chosen.ckpt_format == TORCH:
        path = folder / rank_files.own_folder(args) / rank_files.RANK_FILE
        storage.together(f"loading {folder}", lambda: rank_files.load_model(content, model, path, part))
        if want.optimizer:
            rank_files.load_optimizer(content, folder, args, model, storage)
        random = rank_files.random_state(content, want)
    else:
        random = sharded_reading.load(
            folder, content, model, storage, optimizer=want.optimizer, random=want.rng, part=part
        )

    def finish() -> None:
        if want.optimizer:
            steps = contents.ours(content).get("optimizer_steps")
            steps = optimizer_state.find_steps(content[contents.OPTIMIZER]) if steps is None else steps
            if steps is not None:
                optimizer_state.set_steps(optimizer, steps)
            optimizer_state.set_scaler(optimizer, optimizer_state.find_scaler(content[contents.OPTIMIZER]))
            optimizer_state.put_settings_back(optimizer, settings)
            saved = _values(content[contents.SCHEDULER])
            scheduler_state.restore(model.scheduler, saved, args, str(folder))
        else:
            optimizer.reload_model_params()
            if state.iteration:
                scheduler_state.set_steps(model.scheduler, state.consumed_train_samples)
        if want.rng:
            _restore_random(random, args, state, folder)

    storage.together(f"loading {folder}", finish)
    return state


def _check_optimizer(content: Mapping[str, Any], model: TrainingModel, folder: Path) -> None:
    saved, own = contents.ours(content).get("optimizer"), optimizer_state.kind(model.optimizer)
    if saved is not None and saved != own:
        raise UserError(
            f"--load {folder}: the optimizer's state is of another kind ({saved}, expected {own}): set "
            "--use-distributed-optimizer, --bf16 and --fp16 as they were, or give --no-load-optim"
        )


def _restore_random(random: Mapping[str, Any] | None, args: Namespace, state: TrainState, folder: Path) -> None:
    if random is None:
        logger.info(
            "%s was written by other ranks: random numbers (dropout) go on from --seed and the step instead", folder
        )
        rng.reseed(args.seed, state.iteration)
        return
    try:
        rng.restore(random)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        raise DamagedCheckpoint(
            f"{folder}: the state of random numbers cannot be used ({type(error).__name__}: {error}); give "
            "--no-load-rng"
        ) from error


def _values(saved: Any) -> dict[str, Any]:
    """Entries of a state that may hold tensors of one element."""
    if not isinstance(saved, Mapping):
        raise DamagedCheckpoint(f"the schedule's state is a {type(saved).__name__}")
    return {name: value.view().item() if isinstance(value, StoredTensor) else value for name, value in saved.items()}


def _report(chosen: Chosen, state: TrainState) -> None:
    if state.iteration:
        logger.info(
            "Resumed from %s after step %d (%d samples)", chosen.folder, state.iteration, state.consumed_train_samples
        )
    else:
        logger.info("Took the weights of %s; training starts at step 0", chosen.folder)


def parts_in(found: Opened) -> set[Part]:
    """What a checkpoint holds, on all ranks together (a collective)."""
    keys: list[str]
    if found.chosen.ckpt_format == TORCH:
        models = [value for name, value in found.content.items() if name.startswith("model")]
        keys = [key for value in models if isinstance(value, Mapping) for key in value]
    else:
        entries = read_metadata(found.chosen.folder).state_dict_metadata
        keys = [key for key in entries if not key.startswith((f"{contents.OPTIMIZER}.", f"{contents.RNG}/"))]
    keys = [key for key in keys if not key.endswith("_extra_state") and "/shard_" not in key]
    mine = {part for part in (Part.BASE, Part.ADAPTERS) if any(part.name_of(key) is not None for key in keys)}
    return set().union(*found.storage.gather(mine))
