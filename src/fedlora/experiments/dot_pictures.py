"""Dots: differences to the reference with intervals, a panel per set-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.experiments.grid import Grid
from fedlora.experiments.picture_style import GROUND, INK, MUTED, SHORT, drawn, finished, sheet, wrapped
from fedlora.experiments.scores import scale
from fedlora.experiments.tables import Difference, paired, score_cells
from fedlora.runs.drawing import COLOURS


@dataclass(frozen=True)
class Dots:
    """One set-up. rows: the other labels against the reference. up: 1 if more is better, otherwise -1. reference: its
    own mean. chance: the score of guessing, None if the metric has none."""

    title: str
    rows: Sequence[Difference]
    up: float
    metric: str
    label: str
    reference: float
    chance: float | None

    @property
    def words(self) -> str:
        """The reference in words."""
        by_chance = "" if self.chance is None else f", chance {self.chance:.3f}"
        return f"{self.label}: {'log-loss' if self.metric == 'loss' else self.metric} {self.reference:.3f}{by_chance}"


def dots_of(grid: Grid) -> list[Dots]:
    """A panel for each set-up in which the reference and another label share two seeds."""
    reference, cells = grid.experiment.reference, score_cells(grid)
    if reference is None or not grid.used:
        return []
    found: dict[str, list[Difference]] = {}
    for d in paired(cells, grid.rows, reference):
        found.setdefault(", ".join(d.where.values()), []).append(d)
    at = {", ".join(label for name, label in cell.cell.items() if name != grid.rows): cell
          for cell in cells if cell.cell[grid.rows] == reference}  # fmt: skip
    classes = grid.used[0][1]
    return [
        Dots(title, rows, -1.0 if at[title].less else 1.0, metric, reference, at[title].mean or 0.0,
             classes.chance(metric))
        for title, rows in found.items()
        if (metric := at[title].metric) is not None
    ]  # fmt: skip


@drawn
def dots_figure(grid: Grid) -> Figure | None:
    """All panels of an experiment; None if there is no pair of results."""
    if not (panels := dots_of(grid)):
        return None
    metrics = dict.fromkeys(panel.metric for panel in panels)
    ends = {metric: reach([panel for panel in panels if panel.metric == metric]) for metric in metrics}
    figure, axes = sheet(len(panels), 1.4 + 0.3 * max(len(panel.rows) for panel in panels))
    for k, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        draw_dots(axis, panel, ends[panel.metric])
        axis.set_xlabel(wrapped(panel.words, 30), color=MUTED, fontsize=11)
        axis.set_title(panel.title, loc="left", fontweight="bold")
        if k % 2 and [d.other for d in panel.rows] == [d.other for d in panels[k - 1].rows]:
            axis.set_yticklabels([])
    units = " or ".join(map(scale, metrics))
    figure.supxlabel(wrapped(f"better than {panels[0].label} by, {units}", 56), fontsize=13)
    told = f"paired by seed, 95 % intervals; hollow: zero inside{dotted(panels, ends)}"
    return finished(figure, grid, wrapped(told, 56))


def reach(panels: Sequence[Dots]) -> float:
    """The end of the scale of all panels."""
    return 1.08 * max((max(abs(d.low), abs(d.high)) for panel in panels for d in panel.rows), default=1.0) or 1.0


def dotted(panels: Sequence[Dots], ends: Mapping[str, float]) -> str:
    """A title's words about the lines at the score of guessing, if one is drawn. ends: metric -> end of its scale."""
    gaps = [(panel.metric, abs(panel.chance - panel.reference)) for panel in panels if panel.chance is not None]
    drawn = any(gap <= ends[metric] for metric, gap in gaps)
    return "; dotted: chance" if drawn else ""


def draw_dots(axis: Any, panel: Dots, end: float) -> None:
    """Draw one panel; right is better. A full dot's interval excludes zero."""
    axis.axvline(0, color=INK, linewidth=1.2, zorder=1)
    for y, d in enumerate(panel.rows):
        mean, (low, high) = panel.up * d.mean, sorted((panel.up * d.low, panel.up * d.high))
        axis.plot([low, high], [y, y], color=COLOURS[0], linewidth=2, solid_capstyle="butt")
        axis.plot([mean], [y], "o", color=COLOURS[0], markersize=6, markeredgewidth=1.6,
                  markerfacecolor=COLOURS[0] if d.decided else GROUND)  # fmt: skip
    if panel.chance is not None:
        at = panel.up * (panel.chance - panel.reference)
        if abs(at) <= end:
            axis.axvline(at, color=MUTED, linestyle=(0, (2, 2)), linewidth=1.2)
    axis.set_yticks(range(len(panel.rows)), [wrapped(d.other, SHORT) for d in panel.rows])
    axis.set(xlim=(-end, end), ylim=(len(panel.rows) - 0.4, -0.6))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.tick_params(axis="y", length=0)
    axis.grid(alpha=0.6, axis="x")
    axis.spines["left"].set_visible(False)
