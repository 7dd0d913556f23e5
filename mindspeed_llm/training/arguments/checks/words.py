"""Parts of messages."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.errors import UserError


def require(args: Namespace, flag: str, what: str) -> None:
    """Refuse arguments that lack a flag; `what` says what is expected.

    Raises:
        UserError: the flag is not given.
    """
    if getattr(args, flag.lstrip("-").replace("-", "_")) is None:
        raise UserError(f"{flag} is missing; expected {what}")


def divisors(number: int, most: int | None = None) -> str:
    """The divisors of a number, for `expected one of`."""
    limit = number if most is None else min(number, most)
    return ", ".join(str(size) for size in range(1, limit + 1) if number % size == 0)
