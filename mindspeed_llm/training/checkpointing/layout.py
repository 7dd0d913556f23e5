"""Names in a folder of checkpoints, and what a reader finds there. Needs no torch.

<save>/
    latest_checkpointed_iteration.txt     a number (or "release"); moves last
    iter_0000020/
        manifest.json                     ours: sizes and hashes of the files below
        mp_rank_00_001/model_optim_rng.pt, distrib_optim.pt       --ckpt-format torch
        common.pt, .metadata, __0_0.distcp, metadata.json         --ckpt-format torch_dist
        hf_adapter/                      --save-lora-to-hf: the adapters in PEFT's files
    iter_0000030.tmp/                     never finished
    set_aside.1/iter_0000040/             of another line of training, see `publishing`
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import TEMPORARY_SUFFIX

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
RANK_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
COMMON_FILE = "common.pt"
SHARDED_CONFIG = "metadata.json"
HF_ADAPTER = "hf_adapter"
TORCH = "torch"
TORCH_DIST = "torch_dist"

_ITERATION_FOLDER = re.compile(r"iter_(\d{7,})")
_UNFINISHED = re.compile(rf"iter_\d{{7,}}{re.escape(TEMPORARY_SUFFIX)}")


def iteration_name(iteration: int) -> str:
    """The folder of a checkpoint."""
    return f"iter_{iteration:07d}"


def iterations_in(folder: Path) -> list[int]:
    """The iterations whose checkpoints lie in a folder, lowest first."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _ITERATION_FOLDER.fullmatch(path.name))]
    return sorted(int(match[1]) for match, path in found if path.is_dir())


def unfinished_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder that were never finished."""
    return sorted(path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name))


@dataclass(frozen=True)
class Tracker:
    """What the file says that names the latest checkpoint."""

    iteration: int | None
    """None where it names none."""
    is_release: bool = False
    problem: str | None = None
    """Why nothing can be taken from it; None where it is whole or missing."""


def read_tracker(folder: Path) -> Tracker:
    """Read the file that names the latest checkpoint."""
    path = folder / TRACKER
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return Tracker(None)
    except (OSError, UnicodeDecodeError) as error:
        return Tracker(None, problem=f"{path} cannot be read ({error})")
    if text == RELEASE:
        return Tracker(None, is_release=True)
    if text.isascii() and text.isdecimal():
        return Tracker(int(text))
    return Tracker(None, problem=f"{path} says {text[:40]!r}, expected the number of an iteration, or {RELEASE}")


def format_of(folder: Path) -> str | None:
    """The format of the checkpoint in `folder`; None where it is none."""
    if (folder / SHARDED_CONFIG).is_file() or (folder / COMMON_FILE).is_file():
        return TORCH_DIST
    return TORCH if any(folder.glob(f"mp_rank_*/{RANK_FILE}")) else None


def check_release(folder: Path, flag: str) -> bool:
    """Whether a path names a release, which is then what is loaded from its parent.

    Raises:
        UserError: the tracker names another checkpoint.
    """
    if folder.name != RELEASE or format_of(folder) is None:
        return False
    if not (tracker := read_tracker(folder.parent)).is_release:
        says = "is missing" if tracker.iteration is None else f"says {tracker.iteration}"
        raise UserError(
            f"{flag} {folder}: a release is loaded where {folder.parent / TRACKER} says {RELEASE}, but it "
            f"{tracker.problem or says}; write {RELEASE} into that file, or name another checkpoint"
        )
    return True
