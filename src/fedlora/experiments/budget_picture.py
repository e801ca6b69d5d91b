"""Scores by epsilon, of an experiment with `budgets`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, LogLocator, NullLocator

from fedlora.experiments.budgets import Budget
from fedlora.experiments.picture_style import MARKERS, MUTED, drawn, seeds_in_words
from fedlora.runs.drawing import COLOURS, words

_PROMISES_NOTHING = 1000.0  # a larger epsilon is at the picture's edge, by its label


@drawn
def budgets_figure(found: Sequence[Budget], title: str, lines: str) -> Figure:
    """Accuracy and log-loss by epsilon, a line for each label of `lines` with a band from the least to the largest
    seed. Dashed: the same federation without privacy. At the right edge: cells with almost no noise."""
    labels = list(dict.fromkeys(cell.line for cell in found))
    figure: Figure
    figure, axes = plt.subplots(2, 1, figsize=(7.6, 10.6), layout="constrained")
    for axis, score in zip(axes, ("accuracy", "loss"), strict=True):
        _draw_budgets(axis, found, labels, score)
    handles = [
        plt.Line2D([], [], color=colour, marker=marker, linewidth=2.5, markersize=9, label=f"{label} {lines}")
        for label, (colour, marker) in zip(labels, zip(COLOURS, MARKERS, strict=False), strict=False)
    ]
    handles.append(plt.Line2D([], [], color=MUTED, linestyle="--", linewidth=2, label="without privacy"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    seeds = seeds_in_words([cell.seeds for cell in found])
    figure.suptitle(f"{title}\nmean of {seeds} seeds, shaded: from the least to the largest", fontsize=13)
    return figure


def _tenth_up(epsilon: float) -> float:
    """The position of a tick, rounded up, because epsilon is never understated; float rounding is ignored."""
    return math.ceil(round(epsilon * 10, 9)) / 10


def _draw_budgets(axis: Any, found: Sequence[Budget], labels: Sequence[str], score: str) -> None:
    measured = [cell for cell in found if cell.scores.get(score)]
    private = [cell for cell in measured if cell.epsilon is not None]
    finite = sorted({_tenth_up(cell.epsilon) for cell in private if cell.epsilon and cell.epsilon < _PROMISES_NOTHING})
    edge = 3.0 * max(finite, default=1.0)
    for k, label in enumerate(labels):
        colour, marker = COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)]
        own = sorted((c for c in private if c.line == label), key=lambda c: c.epsilon or 0.0)
        on = [c for c in own if c.epsilon is not None and c.epsilon < _PROMISES_NOTHING]
        x, ends = [c.epsilon for c in on], [c.spread(score) for c in on]
        axis.plot(x, [c.mean(score) for c in on], color=colour, marker=marker, markersize=9, linewidth=2.5)
        axis.fill_between(x, [low for low, _ in ends], [high for _, high in ends], color=colour, alpha=0.15, lw=0)
        for cell in own[len(on) :]:  # almost no noise
            (least, largest), mean = cell.spread(score), cell.mean(score)
            beside = edge * 1.2 ** (k - (len(labels) - 1) / 2)
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
    if score == "loss":  # a model that is confident and wrong has many times the loss of a coin
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_minor_locator(LogLocator(subs=(0.6, 0.7, 0.8)))
        for side in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            side(FormatStrFormatter("%g"))
    axis.grid(alpha=0.3)
