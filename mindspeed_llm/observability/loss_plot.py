"""loss.png: training loss and evaluation points over the iterations.

Drawn through matplotlib's objects on the Agg canvas: no display, no pyplot, no state that other code could share.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindspeed_llm.files import behind_links

FILE_NAME = "loss.png"
_FEW_POINTS = 60  # up to here each point gets a marker
_SMOOTH_FROM = 200  # from here a running mean is drawn over the raw curve
_MAX_DRAWN = 4000  # more points than pixels only make the file slow to write
_RAW_COLOR, _TRAIN_COLOR, _EVAL_COLOR = "#9ec5e8", "#1f6fb4", "#d1495b"


def write_loss_plot(
    path: Path,
    *,
    iterations: Sequence[int],
    losses: Sequence[float],
    eval_iterations: Sequence[int] = (),
    eval_losses: Sequence[float] = (),
    title: str = "Training loss",
) -> None:
    """Write the picture through a temporary file, so that a viewer never reads half of it.

    Args:
        path: file to write or replace.
        iterations, losses: one training point per logged step; non-finite losses leave a gap.
        eval_iterations, eval_losses: the evaluation points.
        title: heading of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    x, y = np.asarray(iterations, dtype=np.int64), np.asarray(losses, dtype=np.float64)
    if len(x):
        if len(x) < _SMOOTH_FROM:
            marker = "o" if len(x) <= _FEW_POINTS else None
            axes.plot(x, y, color=_TRAIN_COLOR, linewidth=1.6, marker=marker, markersize=4, label="train")
        else:
            window = max(len(x) // 100, 5)
            axes.plot(*_thin(x, y), color=_RAW_COLOR, linewidth=0.7, label="train (each logged step)")
            smooth = _running_mean(y, window)
            stride = max(len(x) // _MAX_DRAWN, 1)
            axes.plot(
                x[::stride],
                smooth[::stride],
                color=_TRAIN_COLOR,
                linewidth=1.8,
                label=f"train (mean of {window} logged steps)",
            )
    if len(eval_iterations):
        axes.plot(
            eval_iterations,
            eval_losses,
            color=_EVAL_COLOR,
            linewidth=1.2,
            linestyle="--",
            marker="D",
            markersize=5 if len(eval_iterations) <= _FEW_POINTS else 2.5,
            label="eval",
            zorder=3,
        )
    limits = _loss_limits(y, np.asarray(eval_losses, dtype=np.float64))
    if limits is not None:
        axes.set_ylim(*limits)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(x) or len(eval_iterations):
        axes.legend(frameon=False)
    path = behind_links(path)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        canvas.print_png(file)
    os.replace(temporary, path)


def _thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most _MAX_DRAWN points with the same outline: smallest and largest of each of _MAX_DRAWN / 2 bins."""
    if len(x) <= _MAX_DRAWN:
        return x, y
    kept: list[int] = []
    for bin_indices in np.array_split(np.arange(len(x)), _MAX_DRAWN // 2):
        values = y[bin_indices]
        if np.isfinite(values).any():
            kept += sorted({int(bin_indices[np.nanargmin(values)]), int(bin_indices[np.nanargmax(values)])})
        else:
            kept.append(int(bin_indices[0]))
    return x[kept], y[kept]


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` finite values at each point (fewer at the start); NaN where there are none."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def _loss_limits(train: np.ndarray, evaluated: np.ndarray) -> tuple[float, float] | None:
    """Limits of the loss axis: everything, except that rare training spikes may be cut off at the top.

    The first 2 % of a run start high and are meant to be seen; a spike above the rest by more than the whole visible
    range would flatten the curve to a line.
    """
    train, evaluated = train[np.isfinite(train)], evaluated[np.isfinite(evaluated)]
    everything = np.concatenate([train, evaluated])
    if not len(everything):
        return None
    low, high = float(everything.min()), float(everything.max())
    if len(train) >= _SMOOTH_FROM:
        start = train[: max(len(train) // 50, 1)]
        usual = max(float(np.quantile(train, 0.995)), float(np.median(start)), *evaluated.tolist())
        high = min(high, low + 1.5 * (usual - low))
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
