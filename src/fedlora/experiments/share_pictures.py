"""The share of runs that are below a target by round, and scores by category of tasks."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.experiments.censored import Reaching, reaching
from fedlora.experiments.grid import Grid
from fedlora.experiments.picture_style import (
    MARKERS,
    drawn,
    finished,
    legend,
    line_style,
    seeds_in_words,
    sheet,
    wrapped,
)
from fedlora.experiments.scores import explained, parse_number
from fedlora.experiments.tables import score_by
from fedlora.runs.drawing import COLOURS, words

_SETS = {"test, last": "tasks that clients train on", "unseen, last": "tasks that nobody trains on"}


@drawn
def reaching_figure(grid: Grid) -> Figure | None:
    """Kaplan and Meier's share of runs that are still below the target, a line per label, a panel per combination of
    the others; None if the experiment does not compare rounds to a target. Lines stand a little apart, because shares
    of few runs coincide."""
    number = parse_number(grid.which())
    panels: dict[str, dict[str, Reaching]] = {}
    for one in reaching(grid, number.amount) if number.where == "rounds" else ():
        where = ", ".join(label for axis, label in one.cell.items() if axis in grid.axes and axis != grid.rows)
        panels.setdefault(where, {})[one.cell[grid.rows]] = one
    if not panels:
        return None
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    figure, axes = sheet(len(panels), 4.2 if len(panels) == 1 else 3.1)
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for place, (label, one) in enumerate(lines.items()):
            colour, style = line_style(labels.index(label))
            apart = 0.012 * (place - (len(lines) - 1) / 2)
            rounds = [0.0, *map(float, one.below.quantiles), one.end]
            shares = [1.0, *map(float, one.below.probabilities)]
            shares = [share + apart for share in [*shares, shares[-1]]]
            axis.step(rounds, shares, style, where="post", color=colour, linewidth=2.4)
        axis.set(xlabel="round", ylabel="share of runs below", ylim=(-0.08, 1.08))
        axis.set_title(title, loc="left", fontweight="bold")
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axis.grid(alpha=0.6)
    legend(figure, [
        plt.Line2D([], [], color=line_style(k)[0], linestyle=line_style(k)[1], linewidth=2.5, label=label)
        for k, label in enumerate(labels)
    ])  # fmt: skip
    metric = next(iter(grid.metrics), None)
    counts = seeds_in_words([one.runs for lines in panels.values() for one in lines.values()])
    return finished(figure, grid, wrapped(f"{explained(grid.which(), metric)}; {counts} runs each", 56))


@drawn
def categories_figure(grid: Grid) -> Figure | None:
    """Scores by category, a dot per label, a panel per combination of the other labels: first tasks that clients train
    on, then unseen ones; None for data without categories."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for which in _SETS:
        by_cell = score_by(grid, lambda result, which=which: result.by_category(which))  # type: ignore[misc]
        for (where, label), by in by_cell.items():
            found.setdefault((where, which), {})[label] = by
    if not found:
        return None
    labels = list(dict.fromkeys(label for lines in found.values() for label in lines))
    places = list(dict.fromkeys(where for where, _ in found))
    sets = [which for which in _SETS if any(of == which for _, of in found)]
    names = {which: sorted({c for (_, of), lines in found.items() if of == which for by in lines.values() for c in by})
             for which in sets}  # fmt: skip
    height = 1.3 + 0.3 * max(map(len, names.values()))
    size = {"figsize": (7.2, height * len(places) * len(sets) + 1.4), "layout": "constrained", "squeeze": False}
    figure: Figure
    figure, axes = plt.subplots(len(places) * len(sets), 1, sharex=True, **size)
    for axis, (where, which) in zip(axes[:, 0], [(w, s) for s in sets for w in places], strict=True):
        for label, by in found.get((where, which), {}).items():
            k = labels.index(label)
            axis.plot([by[c] for c in names[which] if c in by], [y for y, c in enumerate(names[which]) if c in by],
                      MARKERS[k % len(MARKERS)], color=COLOURS[k % len(COLOURS)], markersize=8, alpha=0.85)  # fmt: skip
        axis.set_yticks(range(len(names[which])), [wrapped(name, 30) for name in names[which]])
        axis.set_ylim(len(names[which]) - 0.5, -0.5)
        axis.set_title(": ".join([*([where] if where else []), _SETS[which]]), loc="left", fontweight="bold")
        axis.tick_params(axis="y", length=0)
        axis.grid(alpha=0.6)
    axes[-1, 0].set_xlabel(" or ".join(map(words, grid.metrics)))
    legend(figure, [
        plt.Line2D([], [], linestyle="none", marker=MARKERS[k % len(MARKERS)], color=COLOURS[k % len(COLOURS)],
                   markersize=8, label=label)
        for k, label in enumerate(labels)
    ])  # fmt: skip
    return finished(figure, grid, "by category of its tasks, after the last round,\nthe mean over tasks and seeds")
