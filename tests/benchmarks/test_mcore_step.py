"""The guard of the benchmark against sides that do not compute the same."""

from __future__ import annotations

from math import inf, nan

import pytest

from benchmarks.mcore_step import SAME_LOSS, compare

LOSSES = [6.25, 6.0, 5.75]


def test_the_same_losses_pass(capsys: pytest.CaptureFixture[str]) -> None:
    compare(LOSSES, [6.25, 6.0 * (1 - SAME_LOSS / 2)], rounds=2)
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    "bare", [[6.25, 6.01], [6.25, nan], [nan, 6.0], [6.25, -6.0], [inf, 6.0], [], [6.25], [6.25, 6.0, 5.75]]
)
def test_others_end_the_measurement(bare: list[float]) -> None:
    with pytest.raises(SystemExit, match=r"do not compute the same|losses of ours"):
        compare(LOSSES, bare, rounds=2)


def test_losses_of_ours_that_are_no_numbers_or_missing() -> None:
    for ours in ([nan] * 3, [inf] * 3, [-6.25, 6.0, 5.75], [], LOSSES[:2]):
        with pytest.raises(SystemExit):
            compare(ours, [6.25, 6.0], rounds=2)
    with pytest.raises(SystemExit):
        compare([], [], rounds=2)
    with pytest.raises(SystemExit):
        compare([inf] * 3, [inf] * 2, rounds=2)
