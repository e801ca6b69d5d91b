"""The one style of all pictures of experiments: letters, panels, legends. Needs matplotlib (`fedlora[plot]`).

A picture is one figure, readable at 400 points of width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fedlora.experiments.grid import Grid
from fedlora.runs.drawing import COLOURS, saved, under_attack

P = ParamSpec("P")
R = TypeVar("R")
INK, MUTED, FAINT, GROUND = "#222222", "#5c5c5c", "#d9d9d9", "#ffffff"
SHORT = 24  # letters of a label: two labels fit side by side
_STYLES, MARKERS = ("-", "--", ":"), ("o", "s", "^", "D", "v", "P")
_STYLE = {
    "font.size": 13, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "axes.titlecolor": INK,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": FAINT,
    "axes.titlesize": 13, "axes.labelsize": 13, "legend.fontsize": 13, "xtick.labelsize": 12, "ytick.labelsize": 12,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip


def drawn(draw: Callable[P, R]) -> Callable[P, R]:
    """A drawing function, in our style."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        with plt.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return styled


@drawn
def save(figure: Figure, *paths: Path) -> list[Path]:
    """Save the figure as files, each in the format of its name, and close it."""
    return [saved(figure, path) for path in paths]


def line_style(k: int) -> tuple[str, str]:
    """(colour, dashes) of the k-th line of a picture."""
    return COLOURS[k % len(COLOURS)], _STYLES[k // len(COLOURS) % len(_STYLES)]


def sheet(count: int, height: float) -> tuple[Figure, list[Any]]:
    """(figure, as many axes), two per row."""
    columns = min(2, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7.2, height * rows + 1.4), layout="constrained", squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, list(axes.flat[:count])


def wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Draw the legend below all panels, over none; long labels in one column, and on several lines."""
    labels = [wrapped(handle.get_label(), 60) for handle in handles]
    columns = 2 if max(map(len, labels)) <= SHORT else 1
    figure.legend(handles=handles, labels=labels, loc="outside lower center", ncols=columns)


def without(grid: Grid) -> str:
    """A line of a title that names labels without a result."""
    there = {run.cell[grid.rows] for run, _ in grid.used}
    gone = dict.fromkeys(cell[grid.rows] for cell in grid.cells if cell[grid.rows] not in there)
    return f"\n{wrapped('no result: ' + ', '.join(gone), 56)}" if gone else ""


def finished(figure: Figure, grid: Grid, told: str) -> Figure:
    """The figure with the experiment's title, and below it what it shows, what is missing, and who attacked."""
    figure.suptitle(f"{wrapped(grid.experiment.title, 56)}\n{told}{without(grid)}", fontsize=13)
    if grid.attacks:
        under_attack(figure, f"some of these runs, by {'; '.join(grid.attacks)}")
    return figure


def seeds_in_words(counts: Sequence[int]) -> str:
    """ "3", or "2 to 3" where cells differ."""
    return str(counts[0]) if len({*counts}) == 1 else f"{min(counts)} to {max(counts)}"
