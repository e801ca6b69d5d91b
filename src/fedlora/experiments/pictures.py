"""Pictures of an experiment: curves, differences with intervals, scores by an axis of numbers, categories of tasks.

Each is one figure, readable at 400 points of width. Needs matplotlib (`fedlora[plot]`).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.experiments.scores import Line, Number, parse_number
from fedlora.experiments.tables import attacks, by_category, by_cell, differences, in_its_unit, mean_of
from fedlora.experiments.tune import Progress
from fedlora.runs.drawing import COLOURS, check_picture, saved, under_attack
from fedlora.runs.drawing import words as metric_words
from fedlora.training.metrics import by_guessing

INK, MUTED, FAINT, GROUND = "#222222", "#5c5c5c", "#d9d9d9", "#ffffff"
_STYLES, _MARKERS = ("-", "--", ":"), ("o", "s", "^", "D", "v", "P")
_WIDTH, _BANDS = 7.2, 5  # inches; more shaded lines in a panel overlap to a brown in which none is visible
_STYLE = {
    "font.size": 13, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "axes.titlecolor": INK,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": FAINT,
    "axes.titlesize": 13, "axes.labelsize": 13, "legend.fontsize": 13, "xtick.labelsize": 12, "ytick.labelsize": 12,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
Panels = dict[str, dict[str, list[Line]]]  # labels of the other axes -> label of the compared one -> its runs


def drawn(progress: Progress, path: Path) -> list[Path]:
    """Draw what there is, the main picture at `path`, the others beside it by their names; returns the files. Empty if
    there is nothing to draw. Raises `ConfigError` if a file is there that fedlora did not draw."""
    with plt.rc_context(_STYLE):
        made = {
            "numbers": numbers_figure(progress), "curves": curves_figure(progress),
            "differences": differences_figure(progress), "categories": categories_figure(progress),
        }  # fmt: skip
        there = [(name, figure) for name, figure in made.items() if figure is not None]
        places = [path if not k else path.with_stem(f"{path.stem}-{name}") for k, (name, _) in enumerate(there)]
        for place in places:
            check_picture(place)
        return [saved(figure, place) for (_, figure), place in zip(there, places, strict=True)]


def panels_of(progress: Progress) -> Panels:
    """The runs with a result, a panel for each combination of the other labels."""
    grid, found = progress.grid, Panels()
    for cell, runs in by_cell(progress):
        if lines := [line for _, line in runs if "failed" not in line]:
            where = ", ".join(cell[axis] for axis in grid.axes if axis != grid.rows)
            found.setdefault(where, {})[cell[grid.rows]] = lines
    return found


# ---- curves ------------------------------------------------------------------------------------------------------


def curves_figure(progress: Progress) -> Figure | None:
    """The metric on validation by round; None if nothing was evaluated after several rounds."""
    panels = {
        where: {label: lines for label, lines in each.items() if len(_curve(lines[0])) > 1}
        for where, each in panels_of(progress).items()
    }
    panels = {where: each for where, each in panels.items() if each}
    if not panels:
        return None
    labels = list(progress.grid.experiment.axes[progress.grid.rows])
    figure, axes = _sheet(len(panels), 3.1)
    for axis, (where, each) in zip(axes, panels.items(), strict=True):
        for label, lines in each.items():
            _draw_curve(axis, [_curve(line) for line in lines], label, labels.index(label), len(each) <= _BANDS)
        line = next(iter(each.values()))[0]
        guessing = by_guessing(line["metric"], line["classes"])
        if guessing is not None:
            axis.axhline(guessing, color=MUTED, linestyle=":", linewidth=1.2)
        axis.set_xlabel("round" if guessing is None else f"round (dotted: guessing, {guessing:.3g})")
        axis.set_ylabel(f"validation {metric_words(line['metric'])}")
        axis.set_title(where, loc="left", fontweight="bold")
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.grid(alpha=0.6)
    there = dict.fromkeys(label for each in panels.values() for label in each)
    handles = {h.get_label(): h for axis in axes for h in axis.get_lines() if h.get_label() in there}
    _legend(figure, [handles[label] for label in labels if label in handles])
    several = any(len(lines) > 1 for each in panels.values() for lines in each.values())
    return _titled(figure, progress, "mean over seeds" + "; shaded: ± standard error" * several)


def _curve(line: Line) -> dict[int, float]:
    """Round -> the score, where there is a number."""
    values = line["history"]["scores"].get(line["metric"], [])
    return {t: x for t, x in zip(line["history"]["evaluated"], values, strict=False) if x is not None}


def _draw_curve(axis: Any, curves: Sequence[Mapping[int, float]], label: str, k: int, band: bool) -> None:
    rounds = sorted(set.intersection(*map(set, curves)))
    each = [[curve[t] for curve in curves] for t in rounds]
    means = [fmean(values) for values in each]
    colour, style = COLOURS[k % len(COLOURS)], _STYLES[k // len(COLOURS) % len(_STYLES)]
    marker, wide = "o" if len(rounds) < 8 else "", max(1.6, 3.4 - 0.4 * k)  # of two that coincide, both are visible
    axis.plot(rounds, means, style, color=colour, label=label, linewidth=wide, marker=marker, markersize=3.5)
    if band and len(curves) > 1:
        half = [stdev(values) / math.sqrt(len(values)) for values in each]
        ends = [[m - h for m, h in zip(means, half, strict=True)], [m + h for m, h in zip(means, half, strict=True)]]
        axis.fill_between(rounds, *ends, color=colour, alpha=0.16, linewidth=0)


# ---- differences -------------------------------------------------------------------------------------------------


def differences_figure(progress: Progress) -> Figure | None:
    """Dots with 95 % intervals, a panel for each combination of the other labels; None without a pair of seeds."""
    grid, number = progress.grid, progress.grid.number()
    frame = differences(progress, number).frame
    if not len(frame) or frame["low"].isna().all():
        return None
    others = grid.axes[1:]
    groups = [("", frame)] if not others else list(frame.groupby(others, sort=False))
    figure, axes = _sheet(len(groups), 1.4 + 0.3 * max(len(rows) for _, rows in groups))
    end = 1.08 * float(frame[["low", "high", "difference"]].abs().max().max()) or 1.0
    for axis, (where, rows) in zip(axes, groups, strict=True):
        axis.axvline(0, color=INK, linewidth=1.2, zorder=1)
        for y, (_, row) in enumerate(rows.iterrows()):
            decided = row["low"] > 0 or row["high"] < 0
            axis.plot([row["low"], row["high"]], [y, y], color=COLOURS[0], linewidth=2, solid_capstyle="butt")
            axis.plot([row["difference"]], [y], "o", color=COLOURS[0], markersize=6, markeredgewidth=1.6,
                      markerfacecolor=COLOURS[0] if decided else GROUND)  # fmt: skip
        axis.set_yticks(range(len(rows)), [_wrapped(label, 24) for label in rows[grid.rows]])
        axis.set(xlim=(-end, end), ylim=(len(rows) - 0.4, -0.6))
        axis.set_title(", ".join(where) if isinstance(where, tuple) else where, loc="left", fontweight="bold")
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.tick_params(axis="y", length=0)
        axis.grid(alpha=0.6, axis="x")
    figure.supxlabel(_wrapped(f"less {grid.experiment.reference}: {in_its_unit(progress, number)}", 56), fontsize=13)
    return _titled(figure, progress, "paired by seed, 95 % intervals; hollow: zero inside")


# ---- an axis of numbers ------------------------------------------------------------------------------------------


def numbers_figure(progress: Progress) -> Figure | None:
    """The compared number by the labels of the compared axis, if these are numbers: a line for each combination of the
    others. None without two labels that have a mean."""
    grid, number = progress.grid, progress.grid.number()
    means = [(cell, mean_of(number, runs)) for cell, runs in by_cell(progress)]
    lines: dict[str, dict[float, float]] = {}
    if _numeric({cell[grid.rows] for cell in grid.cells}):
        for cell, mean in means:
            if math.isfinite(mean):
                where = ", ".join(cell[axis] for axis in grid.axes if axis != grid.rows)
                lines.setdefault(where, {})[float(cell[grid.rows])] = mean
    if len({x for points in lines.values() for x in points}) < 2:
        return None
    figure, (axis,) = _sheet(1, 4.4)
    for k, (where, points) in enumerate(lines.items()):
        x = sorted(points)
        axis.plot(x, [points[at] for at in x], color=COLOURS[k % len(COLOURS)], label=where, linewidth=2.5,
                  marker=_MARKERS[k % len(_MARKERS)], markersize=8)  # fmt: skip
    axis.set(xlabel=grid.rows, ylabel=_wrapped(in_its_unit(progress, number), 40))
    axis.grid(alpha=0.6)
    _legend(figure, axis.get_lines() if len(lines) > 1 else [])
    return _titled(figure, progress, "mean over seeds")


def _numeric(labels: Iterable[str]) -> bool:
    with suppress(ValueError):
        return all(math.isfinite(float(label)) for label in labels)
    return False


# ---- categories --------------------------------------------------------------------------------------------------


def categories_figure(progress: Progress) -> Figure | None:
    """Scores by category of tasks, a dot for each label: of tasks that clients train on, then of those that nobody
    does; None for data without tasks."""
    sets = {"tasks that clients train on": "test, last", "tasks that nobody trains on": "unseen, last"}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for words, name in sets.items():
        for where, of_label in panels_of(progress).items():
            for label, lines in of_label.items():
                if means := _categories(parse_number(name), lines):
                    found.setdefault(f"{where}: {words}" if where else words, {})[label] = means
    if not found:
        return None
    labels = list(progress.grid.experiment.axes[progress.grid.rows])
    figure, axes = _sheet(len(found), 1.3 + 0.3 * max(len(x) for each in found.values() for x in each.values()), 1)
    for axis, (title, scores_of) in zip(axes, found.items(), strict=True):
        names = sorted({name for averages in scores_of.values() for name in averages})
        for label, averages in scores_of.items():
            k = labels.index(label)
            axis.plot([averages.get(name, math.nan) for name in names], range(len(names)), _MARKERS[k % len(_MARKERS)],
                      color=COLOURS[k % len(COLOURS)], markersize=8, alpha=0.85, label=label)  # fmt: skip
        axis.set_yticks(range(len(names)), [_wrapped(name, 30) for name in names])
        axis.set_title(title, loc="left", fontweight="bold")
        axis.grid(alpha=0.6)
    _legend(figure, axes[0].get_lines())
    return _titled(figure, progress, "by category, after the last round: the mean over tasks and seeds")


def _categories(number: Number, lines: Sequence[Line]) -> dict[str, float]:
    each = [by_category(number, line) for line in lines]
    return {name: fmean(one[name] or 0.0 for one in each) for name in each[0] if all(name in one for one in each)}


# ---- style -------------------------------------------------------------------------------------------------------


def _sheet(count: int, height: float, columns: int = 2) -> tuple[Figure, list[Any]]:
    """(figure, as many axes), at most two side by side."""
    columns = min(columns, count)
    rows = -(-count // columns)
    size = (_WIDTH, height * rows + 1.4)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, list(axes.flat[:count])


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Below all panels, over none; long labels in one column."""
    if labels := [_wrapped(handle.get_label(), 60) for handle in handles]:
        columns = 2 if max(map(len, labels)) <= 24 else 1
        figure.legend(handles=handles, labels=labels, loc="outside lower center", ncols=columns)


def _titled(figure: Figure, progress: Progress, what: str) -> Figure:
    """The figure with the experiment's title, what it shows, what is missing, and who attacked."""
    grid = progress.grid
    there = {label for each in panels_of(progress).values() for label in each}
    gone = [label for label in dict.fromkeys(cell[grid.rows] for cell in grid.cells) if label not in there]
    missing = [_wrapped(f"no result: {', '.join(gone)}", 56)] if gone else []
    figure.suptitle("\n".join([_wrapped(grid.experiment.title, 56), what, *missing]), fontsize=13)
    if found := attacks(progress):
        under_attack(figure, "; ".join(found))
    return figure
