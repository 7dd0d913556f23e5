"""Give finished files their names, in an order in which nothing ever looks whole that is not."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.indexed_format import bin_file, idx_file
from mindspeed_llm.tasks.preprocess.sample_store import summary_file

_ADVICE = {
    errno.ENOSPC: "free some space, or choose another --output-prefix",
    errno.EDQUOT: "the quota is used up: free some space, or choose another --output-prefix",
    errno.EROFS: "choose an --output-prefix in a folder that can be written to",
    errno.EACCES: "choose an --output-prefix in a folder that can be written to",
    errno.EPERM: "choose an --output-prefix in a folder that can be written to",
    errno.ENOTDIR: "a part of the folder's path is a file; choose another --output-prefix",
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
    """Turn the errors of a folder that cannot be written to into one message that says what to do."""
    try:
        yield
    except OSError as error:
        elsewhere = error.filename is not None and not Path(error.filename).is_relative_to(prefix.parent)
        if error.errno not in _ADVICE or elsewhere:
            raise
        raise UserError(
            f"--output-prefix {prefix}: cannot write to {prefix.parent} ({error.strerror}); nothing was published; "
            f"{_ADVICE[error.errno]}"
        ) from error
