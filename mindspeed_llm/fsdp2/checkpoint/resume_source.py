"""What `training.resume_from_checkpoint` may name, checked before anything is made. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint import manifest as layout
from mindspeed_llm.fsdp2.config.training_config import TrainingConfig

FIELD = "training.resume_from_checkpoint"
LATEST = "latest"
_EXPECTED = "expected latest, or the directory of a checkpoint, <output_dir>/checkpoints/global_step_N"
_YES = ("true", "yes", "on", "1", "auto", "last", "newest")
_MOST_SHOWN = 10


def check_resume(training: TrainingConfig) -> None:
    """Check the field, and that the folders for checkpoints and exports can be folders.

    Raises:
        UserError: the field names no checkpoint; the text says what is there. Or a file stands where a folder of
            checkpoints or exports belongs.
    """
    output_dir, wanted = Path(training.output_dir), training.resume_from_checkpoint
    folders = []
    if wanted is not None or training.save_steps or training.save_epochs:
        folders.append(layout.checkpoints_folder(output_dir))
        if training.save_hf_at_checkpoints:
            folders.append(layout.exports_folder(output_dir))
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise UserError(
                f"training.output_dir: {folder} is a file, where a folder for checkpoints is to be; move it away or "
                "name another output_dir"
            )
    if wanted is None or wanted == LATEST:
        return
    problem = _problem(wanted, output_dir)
    if problem is not None:
        raise UserError(f"{FIELD} = {wanted!r} {problem}; {_EXPECTED}")


def _problem(wanted: str, output_dir: Path) -> str | None:
    if not wanted.strip():
        return "is empty; leave it out to start anew"
    path = Path(wanted)
    if not path.exists():
        if wanted.strip().lower() in (LATEST, *_YES):
            return f"does not exist; did you mean {LATEST}?"
        near = path.parent if layout.steps_in(path.parent) else layout.checkpoints_folder(output_dir)
        return f"does not exist{_what_is_there(near)}"
    if not path.is_dir():
        return f"is a file{_what_is_there(path.parent) or _what_is_there(path.parent.parent)}"
    if (path / layout.FILE_NAME).exists():
        return None
    for folder in (path, layout.checkpoints_folder(path)):
        if layout.steps_in(folder):
            choice = f"; for the newest of training.output_dir write {LATEST}" if _is_own(folder, output_dir) else ""
            return f"is no checkpoint but holds some{_what_is_there(folder)}{choice}"
    if path.name.endswith(layout.TEMPORARY_SUFFIX):
        return f"was never finished{_what_is_there(path.parent)}"
    if (path / "config.json").exists():
        return "is a model directory, which a run starts from as model.model_name_or_path"
    return f"is no checkpoint: it has no {layout.FILE_NAME}{_what_is_there(path.parent)}"


def _is_own(folder: Path, output_dir: Path) -> bool:
    return folder.resolve() == layout.checkpoints_folder(output_dir).resolve()


def _what_is_there(folder: Path) -> str:
    found = layout.steps_in(folder)
    if not found:
        return ""
    names = ", ".join(path.name for _, path in found[-_MOST_SHOWN:])
    return f" (in {folder}: {'..., ' if len(found) > _MOST_SHOWN else ''}{names})"
