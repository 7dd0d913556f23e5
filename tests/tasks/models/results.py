"""What the rows of all ranks say together, and the bars for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BAR = 1e-5
"""PARITY: of logits in standard deviations of the reference, and of gradients relative to each tensor's norm."""


def worst(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The greatest errors of all ranks: of the logits, and of the gradient that is furthest off."""
    logits = [result["logits"] for result in results if "logits" in result]
    assert logits, "no rank had logits"
    gradients = [error for result in results for error in result.get("gradients", {}).values()]
    return {"logits": max(logits), "gradients": max(gradients, default=0.0)}


def assert_parity(results: Sequence[dict[str, Any]]) -> None:
    """Logits and gradients are those of the reference, and padding of the vocabulary has none."""
    found = worst(results)
    assert found["logits"] <= BAR, f"logits differ by {found['logits']:.1e} standard deviations"
    wrong = {
        name: error for result in results for name, error in result.get("gradients", {}).items() if not error <= BAR
    }
    assert not wrong, f"gradients that differ: {wrong}"
    assert all(result["padding"] for result in results if "padding" in result), "padding has logits"
