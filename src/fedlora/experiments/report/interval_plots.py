"""Dots with intervals: each label of an experiment against its reference, a panel a set-up.

The numbers are those of `tables.paired`. Needs matplotlib (`fedlora[plot]`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.errors import ConfigError
from fedlora.experiments.plan import mains
from fedlora.experiments.spec import Experiment
from fedlora.experiments.pictures import FAINT, GROUND, INK, MUTED, drawn
from fedlora.experiments.pictures import panel_grid, wrapped
from fedlora.experiments.scores import scale
from fedlora.experiments.result import Result
from fedlora.experiments.tables import Difference, measured_by, paired, score_cells, smaller_is_better
from fedlora.experiments.result import chance
from fedlora.runs.drawing import COLOURS, saved

_REACH = 12.0  # margins from zero to the ends of the scale, at most; what lies beyond stands at the edge, by its number


@dataclass(frozen=True)
class Dots:
    """One set-up. rows: the other labels against the reference. up: 1 where more is better, else -1. reference: its own
    mean. chance: what guessing scores, None where the metric has none. margin: what is too small to matter, or 0."""

    title: str
    rows: Sequence[Difference]
    up: float
    metric: str
    label: str
    reference: float
    chance: float | None
    margin: float

    @property
    def words(self) -> str:
        """The numbers, for who does not see the picture."""
        told = [f"{d.other} {self.up * d.mean:+.4f}" for d in self.rows]
        return f"{self.title}, better than {self.label} by: {', '.join(told)}"


def dots(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = (),
    margins: Mapping[str, float] | None = None,
) -> list[Dots]:  # fmt: skip
    """A panel a set-up in which the reference and another label share two seeds. margins: score -> what is too small to
    matter, of the test set after the last round; that of another number or score is none of these."""
    reference, axis = experiment.reference, experiment.rows[0]
    which = experiment.profile(profile).metric or experiment.metric
    cells = score_cells(experiment, profile, results, failed=failed)
    metric = measured_by(cells)
    if reference is None or metric is None:
        return []
    up = -1.0 if smaller_is_better(which, metric) else 1.0
    margin = (margins or {}).get(metric, 0.0) if which == "test, last" else 0.0
    found: dict[str, list[Difference]] = {}
    for d in paired(cells, axis, reference):
        found.setdefault(", ".join(d.where.values()), []).append(d)
    means = {", ".join(label for name, label in cell.cell.items() if name != axis): cell.mean
             for cell in cells if cell.cell[axis] == reference}  # fmt: skip
    one = next(r for run in mains(experiment, profile, results, failed) if (r := run.result(results)) is not None)
    return [
        Dots(title, rows, up, metric, reference, means[title] or 0.0, chance(one, metric), margin)
        for title, rows in found.items()
    ]


def reach(panels: Sequence[Dots]) -> float:
    """Where the scale of all panels ends."""
    ends = sorted(max(abs(d.low), abs(d.high)) for panel in panels for d in panel.rows)
    margin = max(panel.margin for panel in panels)
    largest = ends[-1] if ends else 1.0
    return 1.08 * (min(largest, _REACH * margin) if margin else largest) or 1.0


def draw_dots(axis: Any, panel: Dots, end: float) -> None:
    """Right is better. A full dot's interval leaves out zero; the grey strip is within the margin; an arrow at the edge
    says that the dot lies beyond it."""
    if panel.margin:
        axis.axvspan(-panel.margin, panel.margin, color=FAINT, alpha=0.55, linewidth=0, zorder=0)
    axis.axvline(0, color=INK, linewidth=1.2, zorder=1)
    for y, d in enumerate(panel.rows):
        mean, (low, high) = panel.up * d.mean, sorted((panel.up * d.low, panel.up * d.high))
        if abs(mean) > end:
            side = 1 if mean > 0 else -1
            axis.annotate(
                f"{mean:+.3f}", (side * end, y), (side * 0.72 * end, y), va="center", fontsize="small",
                ha="right" if side > 0 else "left", color=MUTED, arrowprops={"arrowstyle": "->", "color": COLOURS[0]},
            )  # fmt: skip
            continue
        axis.plot([max(low, -end), min(high, end)], [y, y], color=COLOURS[0], linewidth=2, solid_capstyle="butt")
        axis.plot([mean], [y], "o", color=COLOURS[0], markersize=6, markeredgewidth=1.6,
                  markerfacecolor=COLOURS[0] if d.decided else GROUND)  # fmt: skip
    if panel.chance is not None:
        at = panel.up * (panel.chance - panel.reference)
        if abs(at) <= end:
            axis.axvline(at, color=MUTED, linestyle=(0, (2, 2)), linewidth=1.2)
            axis.annotate("chance", (at, 0), xycoords=("data", "axes fraction"), xytext=(2, 2), color=MUTED,
                          textcoords="offset points", fontsize="small", rotation=90, va="bottom")  # fmt: skip
    axis.set_yticks(range(len(panel.rows)), [d.other for d in panel.rows])
    axis.set(xlim=(-end, end), ylim=(len(panel.rows) - 0.4, -0.6))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.tick_params(axis="y", length=0)
    axis.grid(alpha=0.6, axis="x")
    axis.spines["left"].set_visible(False)


def _told(panel: Dots) -> str:
    by_chance = "" if panel.chance is None else f", chance {panel.chance:.3f}"
    name = "log-loss" if panel.metric == "loss" else panel.metric
    return f"{panel.label}: {name} {panel.reference:.3f}{by_chance}"


def dots_figure(panel: Dots, end: float) -> Figure:
    """One panel as a picture of its own."""
    figure: Figure
    figure, axis = plt.subplots(figsize=(3.6, 1.15 + 0.23 * len(panel.rows)), layout="constrained")
    draw_dots(axis, panel, end)
    figure.suptitle(panel.title, x=0.02, ha="left", fontweight="bold", fontsize=plt.rcParams["font.size"])
    axis.set_title(_told(panel), loc="right", color=MUTED, fontsize=plt.rcParams["font.size"] - 1)
    axis.set_xlabel(f"better by, {scale(panel.metric)}")
    return figure


def plot_dots(
    experiment: Experiment, profile: str, results: Mapping[str, Result], path: Path, failed: Collection[str] = (),
    margins: Mapping[str, float] | None = None,
) -> Path:  # fmt: skip
    """All panels in one picture, two beside each other, to be read at 400 points of width.

    Raises:
        ConfigError: there is no pair of results to draw.
    """
    panels = dots(experiment, profile, results, failed, margins)
    if not panels:
        raise ConfigError(f"experiment {experiment.name} has no result of profile {profile}; run some first.")
    end = reach(panels)
    with drawn(13):
        figure, axes = panel_grid(len(panels), 0.9 + 0.3 * max(len(panel.rows) for panel in panels))
        for k, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
            draw_dots(axis, panel, end)
            axis.set_title(panel.title, loc="left", fontweight="bold")
            if k % 2 and [d.other for d in panel.rows] == [d.other for d in panels[k - 1].rows]:
                axis.set_yticklabels([])
        figure.supxlabel(f"better than {panels[0].label} by, {scale(panels[0].metric)}", fontsize=13)
        margin = panels[0].margin
        strip = f"; grey: within the margin {margin:g}" if margin else ""
        figure.suptitle(
            f"{wrapped(experiment.title, 56)}\npaired by seed, 95 % intervals; hollow: zero inside{strip}", fontsize=13
        )
        return saved(figure, path)
