"""What lies at a path that a model is to be loaded from. Needs no torch.

kind     what it is                                              recognised by
hf       a Hugging Face model directory, or a hub id             config.json
peft     an adapter in PEFT's format                             adapter_config.json without config.json
fsdp2    a checkpoint of the FSDP2 backend, the folder of        manifest.json with .metadata, global_step_N
         several, or the output_dir of a run
mcore    a checkpoint of the Megatron backend (torch or          latest_checkpointed_iteration.txt, iter_*, release,
         torch_dist), or the folder of several                   mp_rank_*, common.pt
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mindspeed_llm.errors import UserError

Kind = Literal["hf", "peft", "fsdp2", "mcore"]

KINDS: dict[Kind, str] = {
    "hf": "a Hugging Face model",
    "peft": "an adapter in PEFT's format",
    "fsdp2": "a checkpoint of the FSDP2 backend",
    "mcore": "a checkpoint of the Megatron backend",
}
_EXPECTED = (
    "Expected a Hugging Face model directory, an adapter's folder, the output_dir or a checkpoint "
    "(checkpoints/global_step_N) of train_fsdp2.py, or the --save folder or a checkpoint (iter_*) of the Megatron "
    "backend"
)
_MEGATRON_RANKS = "mp_rank_*"


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a path leads to. `folder` is where it lies: of an FSDP2 run the checkpoint itself, for `mcore` the path as
    it was given (the folder of several has a file that names the latest). A hub id stands in `folder` as it was
    written.
    """

    kind: Kind
    folder: Path
    notes: tuple[str, ...] = ()
    """What a user should know of how it was chosen."""

    @property
    def description(self) -> str:
        """One line for people."""
        return "; ".join((f"{self.folder}: {KINDS[self.kind]}", *self.notes))


def detect(path: str | Path, *, flag: str = "--load") -> Source:
    """Find out what `path` is.

    Args:
        flag: what users gave the path with, for messages.

    Raises:
        UserError: nothing is there, or nothing that a model can be loaded from; says what was found and expected.
    """
    from mindspeed_llm.fsdp2.config.model_files import is_hub_id

    text, path = str(path), Path(path)
    if not text.strip():
        raise UserError(f"{flag} is empty. {_EXPECTED}")
    if not path.exists():
        if is_hub_id(text):
            return Source(kind="hf", folder=path, notes=("named by its hub id",))
        _refuse_missing(path, flag)
    if not path.is_dir():
        raise UserError(f"{flag} {path} is a file; expected the folder that holds it. {_EXPECTED}")
    for find in (_model_files, _fsdp2, _mcore):
        if (source := find(path, flag)) is not None:
            return source
    raise UserError(f"{flag} {path} {_what_is_wrong(path)}. {_EXPECTED}")


def _model_files(path: Path, flag: str) -> Source | None:
    from mindspeed_llm.fsdp2.checkpoint.manifest import checkpoints_folder, find_checkpoints
    from mindspeed_llm.tasks.checkpoint.peft_config import CONFIG

    kind: Kind = "hf" if (path / "config.json").is_file() else "peft"
    if not (path / ("config.json" if kind == "hf" else CONFIG)).is_file():
        return None
    notes = ()
    if find_checkpoints(path):
        notes = (f"the export at the end of a run, whose checkpoints are in {checkpoints_folder(path)}",)
    return Source(kind=kind, folder=path, notes=notes)


def _fsdp2(path: Path, flag: str) -> Source | None:
    from mindspeed_llm.fsdp2.checkpoint import manifest as layout

    if _is_fsdp2_checkpoint(path):
        if path.name.endswith(layout.TEMPORARY_SUFFIX):
            raise UserError(f"{flag} {path} is a checkpoint that was never finished; name another one of the run")
        _check(path, flag)
        return Source(kind="fsdp2", folder=path)
    folder = next((f for f in (path, layout.checkpoints_folder(path)) if layout.steps_in(f)), None)
    if folder is None:
        return None
    skipped = []
    for _, checkpoint in reversed(layout.steps_in(folder)):
        try:
            layout.check_files(checkpoint, layout.read_manifest(checkpoint), with_hash=False)
        except layout.DamagedCheckpoint as damage:
            skipped.append(f"skipped {checkpoint.name}, which is damaged ({damage})")
            continue
        return Source(kind="fsdp2", folder=checkpoint, notes=("the newest whole one", *skipped))
    raise UserError(f"{flag} {path}: none of its checkpoints is whole: {'; '.join(skipped)}")


def _is_fsdp2_checkpoint(path: Path) -> bool:
    from mindspeed_llm.fsdp2.checkpoint import manifest as layout
    from mindspeed_llm.training.checkpointing.layout import COMMON_FILE

    if (path / COMMON_FILE).exists() or any(path.glob(_MEGATRON_RANKS)):
        return False  # the Megatron backend writes files of the same names
    named_so = re.fullmatch(rf"{layout.STEP_PREFIX}\d+.*", path.name) is not None
    return (path / layout.METADATA).exists() or (named_so and (path / layout.FILE_NAME).exists())


def _check(path: Path, flag: str) -> None:
    """Sizes only: hashes are compared when it is read, by all ranks together."""
    from mindspeed_llm.fsdp2.checkpoint import manifest as layout

    if not (path / layout.FILE_NAME).exists():
        raise UserError(
            f"{flag} {path} is no checkpoint of this program, or one that was never finished: it has no "
            f"{layout.FILE_NAME}; name another one of the run"
        )
    try:
        layout.check_files(path, layout.read_manifest(path), with_hash=False)
    except layout.DamagedCheckpoint as damage:
        raise UserError(f"{flag} {path} is damaged: {damage}; name another checkpoint of the run") from damage


def _mcore(path: Path, flag: str) -> Source | None:
    from mindspeed_llm.training.checkpointing import layout

    if path.name.endswith(layout.TEMPORARY_SUFFIX) and path.name.startswith("iter_"):
        raise UserError(f"{flag} {path} is a checkpoint that was never finished; name another one of the run")
    tests: tuple[Callable[[], bool], ...] = (
        lambda: (path / layout.TRACKER).is_file(),
        lambda: (path / layout.COMMON_FILE).is_file(),
        lambda: any(path.glob(_MEGATRON_RANKS)),
        lambda: bool(layout.iterations_in(path)),
        lambda: (path / layout.RELEASE).is_dir(),
    )
    return Source(kind="mcore", folder=path) if any(test() for test in tests) else None


def _refuse_missing(path: Path, flag: str) -> None:
    if str(path).startswith("~"):
        advice = "~ is not expanded here; write the whole path"
    else:
        near = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
        advice = f"of it, {near} exists; a hub id has the form organisation/name"
    raise UserError(f"{flag} {path} does not exist ({advice}). {_EXPECTED}")


def _what_is_wrong(path: Path) -> str:
    from mindspeed_llm.files import TEMPORARY_SUFFIX

    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "is an empty folder"
    if unfinished := [name for name in names if name.endswith(TEMPORARY_SUFFIX)]:
        return f"holds no finished checkpoint ({', '.join(unfinished[:3])} was never finished)"
    if any(name.endswith((".safetensors", ".bin")) for name in names):
        return "holds weights without a config.json; copy it there from the model that they belong to"
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"holds no model and no checkpoint (it has {shown})"
