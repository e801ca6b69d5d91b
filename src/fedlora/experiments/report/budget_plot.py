"""A picture of what privacy costs: scores by epsilon. Needs matplotlib (`fedlora[plot]`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, LogLocator, NullLocator

from fedlora.experiments.pictures import MUTED
from fedlora.experiments.pictures import legend_entry
from fedlora.experiments.tables import Spent
from fedlora.runs.drawing import COLOURS, saved, words

_PROMISES_NOTHING = 1000.0  # an epsilon beyond it stands at the picture's edge, by its label
_MARKERS = ("o", "s", "^", "D", "v", "P")


def budget_figures(found: Sequence[Spent], lines: str) -> tuple[dict[str, Figure], list[dict[str, str]]]:
    """(score -> its panel as a picture of its own, what a page's legend shows)"""
    labels, figures = list(dict.fromkeys(cell.line for cell in found)), {}
    for score in ("accuracy", "loss"):
        figures[score], axis = plt.subplots(figsize=(4.6, 3.4), layout="constrained")
        _panel(axis, found, labels, score)
        axis.set_xlabel("epsilon (smaller: more private)")
    legend = [legend_entry(f"{label} {lines}", COLOURS[k % len(COLOURS)]) for k, label in enumerate(labels)]
    return figures, [*legend, legend_entry("without privacy", MUTED, "--")]


def plot_budgets(found: Sequence[Spent], title: str, lines: str, path: Path) -> Path:
    """Accuracy and log-loss by epsilon, a line for each label of `lines` with a band from the least to the largest
    seed. Dashed: the same federation without privacy. At the right edge: cells whose noise is next to none."""
    labels = list(dict.fromkeys(cell.line for cell in found))
    figure: Figure
    with plt.rc_context({"font.size": 14}):  # to be read 400 pixels wide
        figure, axes = plt.subplots(2, 1, figsize=(7.6, 10.6), layout="constrained")
        for axis, score in zip(axes, ("accuracy", "loss"), strict=True):
            _panel(axis, found, labels, score)
        handles = [
            plt.Line2D([], [], color=colour, marker=marker, linewidth=2.5, markersize=9, label=f"{label} {lines}")
            for label, (colour, marker) in zip(labels, zip(COLOURS, _MARKERS, strict=False), strict=False)
        ]
        handles.append(plt.Line2D([], [], color="#444444", linestyle="--", linewidth=2, label="without privacy"))
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=14)
        seeds = {cell.seeds for cell in found}
        of = f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{max(seeds)} seeds"
        figure.suptitle(f"{title}\nmean of {of}, shaded: from the least to the largest", fontsize=14)
        return saved(figure, path)


def _tenth_up(epsilon: float) -> float:
    """Where a tick stands: a promise is never understated. What is off by a rounding of floats alone stays."""
    return math.ceil(round(epsilon * 10, 9)) / 10


def _panel(axis: Any, found: Sequence[Spent], labels: Sequence[str], score: str) -> None:
    measured = [cell for cell in found if cell.scores.get(score)]
    private = [cell for cell in measured if cell.epsilon is not None]
    finite = sorted({_tenth_up(cell.epsilon) for cell in private if cell.epsilon and cell.epsilon < _PROMISES_NOTHING})
    edge = 3.0 * max(finite, default=1.0)
    for k, label in enumerate(labels):
        colour, marker = COLOURS[k % len(COLOURS)], _MARKERS[k % len(_MARKERS)]
        own = sorted((c for c in private if c.line == label), key=lambda c: c.epsilon or 0.0)
        on = [c for c in own if c.epsilon is not None and c.epsilon < _PROMISES_NOTHING]
        x, low, high = [c.epsilon for c in on], *_band(on, score)
        axis.plot(x, [c.mean(score) for c in on], color=colour, marker=marker, markersize=9, linewidth=2.5)
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        for cell in own[len(on) :]:  # noise next to none
            (least,), (largest,) = _band([cell], score)
            mean, beside = cell.mean(score), edge * 1.2 ** (k - (len(labels) - 1) / 2)
            axis.errorbar(
                [beside], [mean], yerr=[[mean - least], [largest - mean]], color=colour, marker=marker, markersize=9,
                capsize=5, markerfacecolor="white", markeredgewidth=2, linestyle="none",
            )  # fmt: skip
        for cell in measured:
            if cell.line == label and cell.epsilon is None:
                axis.axhline(cell.mean(score), color=colour, linestyle="--", linewidth=2)
    axis.set_xscale("log")
    ticks: Mapping[float, str] = {e: f"{e:g}" for e in finite}
    beyond = dict.fromkeys(cell.label for cell in private if cell.epsilon and cell.epsilon >= _PROMISES_NOTHING)
    ticks = {**ticks, edge: "\n".join(beyond)} if beyond else ticks
    axis.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticklabels(list(ticks.values()))
    name = "log-loss" if score == "loss" else words(score)
    axis.set(xlabel="epsilon of the whole run (smaller: more private)", ylabel=f"held-out {name}")
    if score == "loss":  # of a model that is sure and wrong it is many times a coin's
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_minor_locator(LogLocator(subs=(0.6, 0.7, 0.8)))
        for side in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            side(FormatStrFormatter("%g"))
    axis.grid(alpha=0.3)


def _band(cells: Sequence[Spent], score: str) -> tuple[list[float], list[float]]:
    spreads = [cell.spread(score) for cell in cells]
    return [low for low, _ in spreads], [high for _, high in spreads]
