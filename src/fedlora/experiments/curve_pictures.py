"""Curves: a score on validation by round, a panel per set-up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.experiments.grid import Grid
from fedlora.experiments.picture_style import MUTED, drawn, finished, legend, line_style, seeds_in_words, sheet
from fedlora.experiments.result import Result
from fedlora.experiments.tables import OWN_DATA
from fedlora.runs.drawing import words

Lines = Mapping[str, Mapping[int, Result]]  # label of the row axis -> seed -> result
_BANDS = 5  # the most shaded lines in a panel: more overlap to a brown in which none is visible


def curves_of(grid: Grid, on: str = "") -> dict[str, dict[str, dict[int, Result]]]:
    """The other labels -> lines, for runs that were evaluated after several rounds; a panel has one metric, on one kind
    of data. on: "" for validation, "test/" for the test set, of runs with `evaluate.test_along`."""
    found: dict[str, dict[str, dict[int, Result]]] = {}
    kinds = {
        run.digest: words(result.metric) + (OWN_DATA if result.on_own_data("validation, best") else "")
        for run, result in grid.used
    }
    for run, result in grid.used:
        if len(result.history.curve(on + result.metric)) > 1:
            where = [label for axis, label in run.cell.items() if axis != grid.rows]
            title = ", ".join([*where, *([kinds[run.digest]] if len({*kinds.values()}) > 1 else [])])
            found.setdefault(title, {}).setdefault(run.cell[grid.rows], {})[run.seed] = result
    return found


@drawn
def curves_figure(grid: Grid, on: str = "") -> Figure | None:
    """All panels of an experiment; None if nothing was evaluated after several rounds. on: see `curves_of`."""
    if not (panels := curves_of(grid, on)):
        return None
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    figure, axes = sheet(len(panels), 3.1)
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        draw_curves(axis, lines, labels, on)
        axis.set_title(title, loc="left", fontweight="bold")
    legend(figure, handles_of(labels, list(panels.values()), on))
    seeds = [len(by_seed) for lines in panels.values() for by_seed in lines.values()]
    bands = "\nshaded: ± standard error" if any(len(p) <= _BANDS for p in panels.values()) and max(seeds) > 1 else ""
    return finished(figure, grid, f"mean of {seeds_in_words(seeds)} seeds{bands}")


def handles_of(labels: Sequence[str], panels: Sequence[Lines], on: str = "") -> list[Any]:
    """The legend's handles. A line that coincides with another in every panel says so."""
    values = {
        label: [{seed: result.history.curve(on + result.metric) for seed, result in lines[label].items()}
                for lines in panels if label in lines]
        for label in labels
    }  # fmt: skip
    found = []
    for k, label in enumerate(labels):
        first = next((other for other in labels[:k] if values[label] and values[other] == values[label]), None)
        colour, style = line_style(k)
        told = label if first is None else f"{label} (lies on {first})"
        found.append(plt.Line2D([], [], color=colour, linestyle=style, linewidth=2.5, label=told))
    return found


def draw_curves(axis: Any, lines: Lines, labels: Sequence[str], on: str = "") -> None:
    """The metric by round, a line per label: means over seeds, few of them shaded by the mean's standard error.
    labels: of all panels, for the colours."""
    curves = {label: _by_round(by_seed, on) for label, by_seed in lines.items()}
    for place, (label, curve) in enumerate(curves.items()):
        colour, style = line_style(labels.index(label))
        rounds = sorted(set.intersection(*(set(each) for each in curve.values())))
        means = [fmean(each[t] for each in curve.values()) for t in rounds]
        marker = "o" if len(rounds) < 8 else ""
        wide = max(1.6, 3.4 - 0.4 * place)  # if two coincide, both are visible
        axis.plot(rounds, means, style, color=colour, label=label, linewidth=wide, marker=marker, markersize=3.5)
        if len(lines) <= _BANDS:
            ends = [_band([each[t] for each in curve.values()], mean) for t, mean in zip(rounds, means, strict=True)]
            axis.fill_between(rounds, *zip(*ends, strict=True), color=colour, alpha=0.16, linewidth=0)
    first = next(result for by_seed in lines.values() for result in by_seed.values())
    chance = chance_line(axis, first.chance())
    name = "log-loss" if first.metric == "loss" else words(first.metric)
    axis.set(xlabel=f"round{chance}", ylabel=f"{on.rstrip('/') or 'validation'} {name}")
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.grid(alpha=0.6)


def _by_round(by_seed: Mapping[int, Result], on: str) -> dict[int, dict[int, float]]:
    """Seed -> round -> value, for evaluations that gave a number."""
    return {
        seed: {t: value for t, value in result.history.curve(on + result.metric).items() if not math.isnan(value)}
        for seed, result in by_seed.items()
    }


def _band(values: Sequence[float], mean: float) -> tuple[float, float]:
    if len(values) < 2:
        return mean, mean
    half = stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def chance_line(axis: Any, at: float | None) -> str:
    """Draw a line at the score of guessing, unless that would flatten the others. Returns the words about it for an
    axis's label, because words inside the panel would overlap curves."""
    if at is None:
        return ""
    low, high = axis.get_ylim()
    if low - 0.8 * (high - low) <= at <= high + 0.8 * (high - low):
        axis.axhline(at, color=MUTED, linestyle=(0, (2, 2)), linewidth=1.2)
        return f" (dotted: chance {at:.3g})"
    return f" (chance {at:.3g} lies {'above' if at > high else 'below'})"
