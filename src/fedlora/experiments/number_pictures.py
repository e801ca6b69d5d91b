"""Scores by an axis of numbers: over rho as lines, over gamma and a learning rate as a heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedlora.experiments.grid import Grid
from fedlora.experiments.picture_style import (
    FAINT,
    INK,
    MARKERS,
    drawn,
    finished,
    legend,
    line_style,
    seeds_in_words,
    sheet,
    wrapped,
)
from fedlora.experiments.tables import CellScore, in_its_unit, score_cells, units_of
from fedlora.runs.drawing import words


@drawn
def numbers_figure(grid: Grid) -> Figure | None:
    """The compared number by the row axis, if its labels are numbers: a line per combination of the other labels;
    with a second such axis a heat map per combination. None without two labels with a mean, or with several units."""
    cells = [cell for cell in score_cells(grid) if cell.scores or cell.none]
    axes = _of_numbers(grid, cells)
    if grid.rows not in axes or len(units_of(cells)) > 1:
        return None
    if len({cell.cell[grid.rows] for cell in cells if cell.mean is not None}) < 2:
        return None
    seeds = seeds_in_words([len(cell.scores) for cell in cells])
    told = wrapped(f"{in_its_unit(grid.which(), cells)}; mean of {seeds} seeds", 56)
    panels: dict[str, list[CellScore]] = {}
    second = next((axis for axis in axes if axis != grid.rows), None)
    for cell in cells:
        where = [label for axis, label in cell.cell.items() if axis in grid.axes and axis not in (grid.rows, second)]
        panels.setdefault(", ".join(where), []).append(cell)
    draw = _lines if second is None else _landscapes
    unit = words(next(cell.metric for cell in cells if cell.metric))
    return finished(draw(grid, panels, unit, second or ""), grid, told)


def _of_numbers(grid: Grid, cells: Sequence[CellScore]) -> list[str]:
    """The axes with several labels that are all numbers."""
    found = []
    for axis in grid.experiment.axes:
        labels = {cell.cell[axis] for cell in cells}
        with suppress(ValueError):
            if len(labels) > 1 and all(math.isfinite(float(label)) for label in labels):
                found.append(axis)
    return found


def _lines(grid: Grid, panels: Mapping[str, Sequence[CellScore]], unit: str, second: str) -> Figure:
    figure: Figure
    figure, axis = plt.subplots(figsize=(7.2, 5.2), layout="constrained")
    for k, (label, cells) in enumerate(panels.items()):
        colour, style = line_style(k)
        there = sorted((cell for cell in cells if cell.mean is not None), key=lambda cell: float(cell.cell[grid.rows]))
        axis.errorbar(
            [float(cell.cell[grid.rows]) for cell in there], [cell.mean for cell in there],
            yerr=[cell.spread or 0.0 for cell in there], color=colour, linestyle=style,
            marker=MARKERS[k % len(MARKERS)], markersize=8, linewidth=2.5, capsize=4, label=label,
        )  # fmt: skip
    ticks = sorted({float(cell.cell[grid.rows]) for cells in panels.values() for cell in cells})
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set(xlabel=f"{grid.rows} (bars: ± standard deviation)", ylabel=unit)
    axis.grid(alpha=0.6)
    if len(panels) > 1:
        legend(figure, axis.get_legend_handles_labels()[0])
    return figure


def _landscapes(grid: Grid, panels: Mapping[str, Sequence[CellScore]], unit: str, second: str) -> Figure:
    figure, axes = sheet(len(panels), 3.4)
    means = [cell.mean for cells in panels.values() for cell in cells if cell.mean is not None]
    norm = Normalize(min(means), max(means))
    for axis, (label, cells) in zip(axes, panels.items(), strict=True):
        _landscape(axis, grid.rows, second, cells, norm)
        axis.set_title(label, loc="left", fontweight="bold")
    figure.colorbar(plt.cm.ScalarMappable(norm, "cividis"), ax=axes, location="bottom", label=unit, aspect=40)
    return figure


def _landscape(axis: Any, rows: str, second: str, cells: Sequence[CellScore], norm: Normalize) -> None:
    """One heat map, with the means as numbers and a frame around the best; grey: a run has no number."""
    x, y = (sorted({cell.cell[of] for cell in cells}, key=float) for of in (second, rows))
    told = [cell for cell in cells if cell.mean is not None]
    best = (min if cells[0].less else max)(told, key=lambda cell: cell.mean or 0.0, default=None)
    for cell in cells:
        at = x.index(cell.cell[second]), y.index(cell.cell[rows])
        colour = FAINT if cell.mean is None else plt.get_cmap("cividis")(norm(cell.mean))
        axis.add_patch(Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, facecolor=colour, edgecolor="none"))
        dark = cell.mean is not None and norm(cell.mean) < 0.5
        text = "none" if cell.mean is None else f"{cell.mean:.3f}".replace("0.", ".", 1)
        axis.text(*at, text, ha="center", va="center", fontsize=10.5, color="#ffffff" if dark else INK)
        if cell is best:
            axis.add_patch(
                Rectangle((at[0] - 0.46, at[1] - 0.46), 0.92, 0.92, fill=False, edgecolor=INK, linewidth=2.4)
            )
    axis.set(xlim=(-0.5, len(x) - 0.5), ylim=(-0.5, len(y) - 0.5), xlabel=second, ylabel=rows)
    axis.set_xticks(range(len(x)), x)
    axis.set_yticks(range(len(y)), y)
    axis.tick_params(length=0)
