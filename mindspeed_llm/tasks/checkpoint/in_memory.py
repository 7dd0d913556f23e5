"""A Megatron checkpoint in memory: the tensors of a running job's ranks, for the converter to read like files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.tasks.checkpoint.mg_reader import RANK_FILE, MgDirectory, RankFile


@dataclass(frozen=True)
class HeldTensor:
    """A tensor in memory that is read like one in a file."""

    values: torch.Tensor
    """On the meta device where nothing but shapes is asked for."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the values."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        return tuple(self.values.shape)

    def view(self) -> torch.Tensor:
        """The values."""
        return self.values


class HeldDirectory(MgDirectory):
    """A checkpoint whose files are in memory."""

    def __init__(
        self,
        folder: Path,
        arguments: Mapping[str, Any],
        ranks: Mapping[str, Mapping[str, Mapping[str, torch.Tensor]]],
    ) -> None:
        """
        Args:
            folder: what messages and reports call it; need not exist.
            arguments: those that the checkpoint carries.
            ranks: by the name of a rank's folder (`mp_rank_00_001`) its models (`model`, or `model0`, ...), each with
                its tensors by their key.
        """
        self.folder = folder
        self.rank_folders = sorted(folder / name for name in ranks)
        self._files = {
            folder / name / RANK_FILE: RankFile(
                path=folder / name / RANK_FILE,
                arguments=arguments,
                models={
                    chunk: {key: HeldTensor(values) for key, values in model.items()} for chunk, model in models.items()
                },
            )
            for name, models in ranks.items()
        }

    def is_there(self, folder: Path) -> bool:
        """See `MgDirectory`."""
        return folder / RANK_FILE in self._files
