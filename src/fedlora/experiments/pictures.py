"""Which pictures an experiment or a comparison has. Needs matplotlib (`fedlora[plot]`).

curve_pictures      a score by round            number_pictures   by the labels of an axis of numbers: rho, gamma x rate
dot_pictures        differences, intervals      category_pictures scores by category of tasks
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fedlora.experiments.category_pictures import categories_figure
from fedlora.experiments.curve_pictures import curves_figure, curves_of, draw_curves, handles_of
from fedlora.experiments.dot_pictures import dots_figure, dots_of, dotted, draw_dots, reach
from fedlora.experiments.grid import Grid
from fedlora.experiments.number_pictures import numbers_figure
from fedlora.experiments.picture_style import SHORT, drawn, legend, without, wrapped
from fedlora.experiments.scores import scale
from fedlora.runs.drawing import under_attack


def figures_of(grid: Grid) -> dict[str, Figure]:
    """The pictures of an experiment by name, the main one first: scores by an axis of numbers;
    otherwise curves, or dots if runs were evaluated once. Empty if there is nothing to draw."""
    made = {
        "numbers": numbers_figure(grid),
        "curves": curves_figure(grid), "test-curves": curves_figure(grid, "test/"),
        "categories": categories_figure(grid),
    }  # fmt: skip
    there = {name: figure for name, figure in made.items() if figure is not None}
    dots = None if {*there} & {"numbers", "curves"} else dots_figure(grid)
    return there if dots is None else {"dots": dots, **there}


@drawn
def comparison_figure(grid: Grid, order: Sequence[str]) -> Figure | None:
    """Curves, if methods were evaluated after several rounds, above the differences to the reference, if there are
    several seeds. order: all labels, which determine the colours. None for one seed and one evaluated round."""
    curves = curves_of(grid)
    shown = [panel for panel in dots_of(grid) if panel.rows]
    if not curves and not shown:
        return None
    labels = {label for lines in curves.values() for label in lines}
    heights = [4.2] * len(curves) + [1.2 + 0.22 * sum(2 + len(d.other) // SHORT for d in panel.rows) for panel in shown]
    size = {"figsize": (7.2, sum(heights) + 0.4 + 0.25 * len(labels)), "height_ratios": heights}
    figure: Figure
    figure, axes = plt.subplots(len(heights), 1, layout="constrained", squeeze=False, **size)
    column = list(axes[:, 0])
    for title, lines in curves.items():
        axis, seeds = column.pop(0), max(map(len, lines.values()))
        draw_curves(axis, lines, order)
        told = "one seed" if seeds == 1 else f"mean of {seeds} seeds; shaded: ± standard error"
        axis.set_title("\n".join([*([wrapped(title, 56)] if title else []), told]))
    if curves:
        handles = handles_of(order, list(curves.values()))
        legend(figure, [handle for label, handle in zip(order, handles, strict=True) if label in labels])
    for axis, panel in zip(column, shown, strict=True):
        end = reach([panel])
        draw_dots(axis, panel, end)
        chance = dotted([panel], {panel.metric: end})
        axis.set_title(f"paired by seed, 95 % interval; hollow: zero inside{chance}", loc="right")
        axis.set_xlabel(wrapped(f"better than {panel.label} by, {scale(panel.metric)} ({grid.which()})", 56))
    if gone := without(grid):
        figure.suptitle(gone.strip(), fontsize=13)
    if grid.attacks:
        under_attack(figure, "; ".join(grid.attacks))
    return figure
