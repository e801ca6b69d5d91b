"""Pictures of experiments, from their stored results. Needs matplotlib (`fedlora[plot]`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.experiments.plan import mains
from fedlora.experiments.results import Result
from fedlora.experiments.spec import Experiment
from fedlora.runs.plots import COLOURS, saved, words


def plot_curves(
    experiment: Experiment, profile: str, results: Mapping[str, Result], path: Path | BinaryIO
) -> Path | BinaryIO:
    """The validation metric by round, a panel for each combination of labels but the first row axis, a line a label of
    that: means over seeds, with the range of the seeds around."""
    axis_name = experiment.rows[0]
    runs = [run for run in mains(experiment, profile, results) if run.digest in results]
    panels: dict[str, dict[str, list[Result]]] = {}
    for run in runs:
        panel = ", ".join(label for axis, label in run.cell.items() if axis != axis_name)
        panels.setdefault(panel, {}).setdefault(run.cell[axis_name], []).append(results[run.digest])
    columns = min(3, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure: Figure
    figure, axes = plt.subplots(
        rows, columns, figsize=(max(5.2 * columns, 9), 3.6 * rows + 0.5), layout="constrained", squeeze=False
    )
    labels = list(dict.fromkeys(run.cell[axis_name] for run in runs))
    for axis, (panel, lines) in zip(axes.flat, panels.items(), strict=False):
        for label, found in lines.items():
            k = labels.index(label)
            curves = [
                {line["round"]: line["metrics"][r.metric] for line in r.raw["history"] if line["metrics"]}
                for r in found
            ]
            rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
            values = [[curve[t] for curve in curves] for t in rounds]
            colour, style = COLOURS[k % len(COLOURS)], ("-", "--", ":")[k // len(COLOURS) % 3]
            axis.plot(rounds, [sum(v) / len(v) for v in values], style, color=colour, label=f"{label} ({len(found)})")
            axis.fill_between(rounds, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.08)
        axis.set(xlabel="round", ylabel=f"validation {words(runs[0].config.evaluate.metric)}", title=panel or None)
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(),
        fontsize=8,
        loc="outside lower center",
        ncols=min(5, len(labels) or 1),
    )
    figure.suptitle(f"{experiment.title}: mean over seeds, range shaded", fontsize=11)
    if isinstance(path, Path):
        return saved(figure, path)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
