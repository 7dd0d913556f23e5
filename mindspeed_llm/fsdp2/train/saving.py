"""When a run saves, and what it saves besides tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mindspeed_llm.checkpoints.storage import CheckpointError
from mindspeed_llm.fsdp2.checkpoint.manager import CheckpointManager
from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.platform import distributed
from mindspeed_llm.platform.random import rng_state

logger = get_logger(__name__)


class Saver:
    """Saves at the steps that the configuration names. Without a manager (saving is off) it does nothing."""

    def __init__(
        self,
        config: TrainingConfig,
        manager: CheckpointManager | None,
        *,
        samples_per_epoch: int,
        export: Callable[[int], None],
    ) -> None:
        """`export(step)` writes the Hugging Face export of a save point."""
        self._config, self._manager, self._export = config, manager, export
        self._samples_per_epoch = samples_per_epoch
        self._failures = 0

    @property
    def is_on(self) -> bool:
        """Whether checkpoints are saved at all."""
        return self._manager is not None

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank; all ranks must then call `wait`."""
        return self._manager is not None and self._manager.failed

    def is_due(self, *, step: int, is_last: bool, samples_before: int, samples_after: int) -> bool:
        """Whether a checkpoint is wanted after `step`, which took the samples up to `samples_after`."""
        if self._manager is None:
            return False
        every, epochs = self._config.save_steps, self._config.save_epochs
        if is_last or (every and step % every == 0):
            return True
        per_save = epochs * self._samples_per_epoch
        return bool(epochs) and samples_after // per_save > samples_before // per_save

    def save(self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
        """Save now (a collective). A failure ends the run or is reported, as `training.save_error` says."""
        if self._manager is None:
            return
        manager = self._manager
        # A failure of the save before is dealt with first; where training goes on, this one takes place all the same.
        self._guard(manager.wait)
        self._guard(
            lambda: manager.save(
                step, model=model, optimizer=optimizer, rank_state={"rng": rng_state()}, progress=progress
            )
        )
        if self._config.save_hf_at_checkpoints:
            self._export(step)
            if distributed.is_rank_zero():
                manager.remove_old_exports(step)

    def wait(self) -> None:
        """Wait for a save in the background (all ranks must call this)."""
        if self._manager is not None:
            self._guard(self._manager.wait)

    def report(self) -> None:
        """Log how many checkpoints could not be written in all, if any, and which is the newest."""
        if self._manager is not None and self._failures and distributed.is_rank_zero():
            newest = self._manager.newest()
            logger.error(
                "%d %s could not be written; %s",
                self._failures,
                "checkpoint" if self._failures == 1 else "checkpoints",
                f"the newest whole one is {newest}" if newest else "there is none",
            )

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CheckpointError as error:
            # Every rank says it: whoever looks at the log of one node must see it there.
            logger.error("%s; older checkpoints are untouched", error)
            self._failures += 1
            if self._config.save_error == "stop":
                raise
