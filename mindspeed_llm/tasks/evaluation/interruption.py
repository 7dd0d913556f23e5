"""What is said when an evaluation is ended from outside, with Ctrl-C or by a signal."""

from __future__ import annotations


def how_far(finished: int | None, total: int) -> str:
    """The line about an evaluation that has ended early; `finished` None: its samples are not kept."""
    if finished is None:
        return "the evaluation was ended; its samples are not kept, as the weights cannot be told from others"
    if not finished:
        return f"the evaluation was ended before any of {total} samples was stored; the same command begins anew"
    return (
        f"the evaluation was ended: {finished} of {total} samples are finished and stored; the same command goes on "
        "from there"
    )
