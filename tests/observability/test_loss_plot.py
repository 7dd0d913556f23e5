"""loss.png at few and at many points: what is drawn is read back from the figure, and the file is a picture."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from mindspeed_llm.observability import loss_plot


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collects the figures that are made."""
    made: list[Figure] = []
    original = Figure.__init__

    def record(self: Figure, *args, **keywords) -> None:
        original(self, *args, **keywords)
        made.append(self)

    monkeypatch.setattr(Figure, "__init__", record)
    return made


def _curve(points: int) -> tuple[np.ndarray, np.ndarray]:
    iterations = np.arange(1, points + 1)
    noise = np.random.default_rng(0).normal(0, 0.1, points)
    return iterations, 2 + 8 * np.exp(-20 * iterations / points) + noise


def _drawn(figure: Figure) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    [axes] = figure.axes
    return {line.get_label(): line.get_data() for line in axes.lines}


@pytest.mark.parametrize("points", [0, 1, 5, 150, 50_000])
def test_a_picture_is_written_at_every_length(points: int, tmp_path: Path, figures: list[Figure]) -> None:
    iterations, losses = _curve(points)
    path = tmp_path / "loss.png"
    loss_plot.write_loss_plot(path, iterations=iterations, losses=losses)
    picture = matplotlib.image.imread(path)
    assert picture.shape[0] > 400 and picture.shape[1] > 800 and picture.std() > 0.01
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]
    [axes] = figures[0].axes
    assert axes.get_xlabel() == "iteration" and axes.get_ylabel() == "loss (nats per token)" and axes.get_title()


def test_few_points_are_drawn_as_they_are_with_the_evaluations(tmp_path: Path, figures: list[Figure]) -> None:
    loss_plot.write_loss_plot(
        tmp_path / "loss.png",
        iterations=[1, 2, 3],
        losses=[3.0, math.nan, 2.0],
        eval_iterations=[0, 3],
        eval_losses=[3.5, 2.5],
    )
    drawn = _drawn(figures[0])
    assert set(drawn) == {"train", "eval"}
    np.testing.assert_array_equal(drawn["train"][1], [3.0, np.nan, 2.0])
    np.testing.assert_array_equal(drawn["eval"], [[0, 3], [3.5, 2.5]])
    low, high = figures[0].axes[0].get_ylim()
    assert low < 2.0 and high > 3.5
    assert all(line.get_marker() not in (None, "None") for line in figures[0].axes[0].lines)


def test_many_points_are_thinned_without_losing_their_outline(tmp_path: Path, figures: list[Figure]) -> None:
    iterations, losses = _curve(50_000)
    losses[30_000], losses[40_000] = 500.0, 0.5  # a spike up and one down
    loss_plot.write_loss_plot(tmp_path / "loss.png", iterations=iterations, losses=losses)
    drawn = _drawn(figures[0])
    raw, smooth = drawn["train (each logged step)"], drawn["train (mean of 500 logged steps)"]
    assert len(raw[0]) <= 4000 and len(smooth[0]) <= 4200
    assert np.all(np.diff(raw[0]) > 0)
    assert raw[1].max() == 500.0 and raw[1].min() == 0.5
    place = np.searchsorted(smooth[0], 25_000)
    last = smooth[0][place]
    assert smooth[1][place] == pytest.approx(losses[last - 500 : last].mean())
    low, high = figures[0].axes[0].get_ylim()
    assert low < 0.5 and 10 < high < 30, "the spike does not flatten the curve, the start is in the picture"


def test_the_running_mean_passes_over_gaps() -> None:
    values = np.array([1.0, math.nan, 3.0, 5.0, math.nan, math.nan, math.nan])
    np.testing.assert_allclose(loss_plot._running_mean(values, 3), [1, 1, 2, 4, 4, 5, math.nan])


def test_no_global_state_of_the_plotting_library_is_touched(tmp_path: Path) -> None:
    before = {name for name in sys.modules if name.startswith("matplotlib.pyplot")}
    loss_plot.write_loss_plot(tmp_path / "loss.png", iterations=[1], losses=[1.0])
    assert {name for name in sys.modules if name.startswith("matplotlib.pyplot")} == before
