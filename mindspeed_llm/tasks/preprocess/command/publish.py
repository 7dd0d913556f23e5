"""Give finished files their names, in an order in which nothing ever looks whole that is not."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.workspace import workspace_folder
from mindspeed_llm.tasks.preprocess.indexed_format import bin_file, idx_file
from mindspeed_llm.tasks.preprocess.sample_store import summary_file

_ADVICE = {
    errno.ENOSPC: "free some space, or choose another --output-prefix",
    errno.EDQUOT: "the quota is used up: free some space, or choose another --output-prefix",
    errno.EROFS: "choose an --output-prefix in a folder that can be written to",
    errno.EACCES: "choose an --output-prefix in a folder that can be written to",
    errno.EPERM: "choose an --output-prefix in a folder that can be written to",
    errno.ENOTDIR: "a part of the folder's path is a file; choose another --output-prefix",
    errno.ENAMETOOLONG: "choose a shorter --output-prefix",
    errno.EEXIST: "a part of the folder's path is a file; choose another --output-prefix",
}


def publish(prefix: Path, made: Mapping[Path, Path], summary: Path, *, stale: Sequence[Path] = ()) -> None:
    """Rename the indexed files `made` (final prefix -> prefix of the finished files) and their summary.

    First the old summary and all old indices go, those of `stale` included, then come the data, the indices, and the
    summary. Wherever this is cut off, old and new files never stand together as one whole. All names are of one folder.
    """
    summary_file(prefix).unlink(missing_ok=True)
    for old in (*made, *stale):
        idx_file(old).unlink(missing_ok=True)
    for old in stale:
        bin_file(old).unlink(missing_ok=True)
    for final, finished in made.items():
        bin_file(finished).replace(bin_file(final))
    for final, finished in made.items():
        idx_file(finished).replace(idx_file(final))
    summary.replace(summary_file(prefix))
    folder = os.open(prefix.parent, os.O_RDONLY)
    try:
        # Names are durable when the folder is.
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def naming_the_folder(prefix: Path) -> Iterator[None]:
    """Turn the errors of a folder that cannot be made or written to into one message that says what to do."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename or prefix)
        # Of a folder that is to be made, it may be one above it that fails; files in it may also be those of the input.
        is_above = prefix.parent.is_relative_to(place)
        if not is_above and not (place.is_relative_to(prefix.parent) and error.errno in _ADVICE):
            raise
        raise UserError(
            f"--output-prefix {prefix}: cannot write to {prefix.parent} ({error.strerror}); nothing was published; "
            f"{_ADVICE.get(error.errno or 0, 'choose another --output-prefix')}"
        ) from error


def check_prefix(prefix: Path, targets: Iterable[Path]) -> None:
    """Check that files of these names can exist; `targets` are the prefixes of the indexed files.

    Raises UserError: the folder is, or is below, a file; a name is too long for the file system.
    """
    folder = prefix.parent
    try:
        while not folder.exists():
            if folder.is_symlink():
                raise UserError(f"--output-prefix {prefix}: {folder} is a link to nowhere; choose another prefix")
            folder = folder.parent
        if not folder.is_dir():
            raise UserError(f"--output-prefix {prefix}: {folder} is a file, not a folder; choose another prefix")
        longest = os.pathconf(folder, "PC_NAME_MAX")
    except OSError as error:
        raise UserError(
            f"--output-prefix {prefix}: no folder can be there ({error.strerror}); choose another prefix"
        ) from error
    names = [*prefix.parent.parts, workspace_folder(prefix).name, *(bin_file(target).name for target in targets)]
    for name in (*names, summary_file(prefix).name):
        if (size := len(os.fsencode(name))) > longest:
            raise UserError(
                f"--output-prefix {prefix}: the name {name} has {size} bytes, more than the {longest} that the file "
                "system allows; choose a shorter prefix"
            )
