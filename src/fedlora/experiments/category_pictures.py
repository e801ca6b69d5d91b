"""Scores by category of tasks."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fedlora.experiments.grid import Grid
from fedlora.experiments.picture_style import MARKERS, drawn, finished, legend, wrapped
from fedlora.experiments.tables import score_by
from fedlora.runs.drawing import COLOURS, words

_SETS = {"test, last": "tasks that clients train on", "unseen, last": "tasks that nobody trains on"}


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
