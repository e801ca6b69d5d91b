"""Pictures of experiments, from their stored results. Needs matplotlib (`fedlora[plot]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.experiments.plan import mains
from fedlora.experiments.results import Result
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tables import Difference
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
            colour, style = COLOURS[k % len(COLOURS)], ("-", "--", ":")[k // len(COLOURS) % 3]
            _curve(axis, found, colour, style, f"{label} ({len(found)})")
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


def plot_comparison(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    differences: Sequence[Difference],
    which: str,
    path: Path,
) -> Path:
    """Left: the validation metric by round, a line a method with the range of its seeds. Right, where there are several
    seeds: the paired differences of `which` to the reference with their 95 % intervals."""
    axis_name = experiment.rows[0]
    found: dict[str, list[Result]] = {}
    for run in mains(experiment, profile, results):
        if run.digest in results:
            found.setdefault(run.cell[axis_name], []).append(results[run.digest])
    metric = next(iter(found.values()))[0].metric
    seeds = max(len(runs) for runs in found.values())
    figure: Figure
    height = max(4.0, 1.6 + 0.3 * len(found))
    if differences:
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, height), layout="constrained", width_ratios=(1.15, 1))
    else:
        figure, left = plt.subplots(figsize=(7, height), layout="constrained")
    for k, (label, runs) in enumerate(found.items()):
        style = ("-", "--", ":")[k // len(COLOURS) % 3]
        _curve(left, runs, COLOURS[k % len(COLOURS)], style, f"{label} ({runs[0].raw['target']})")
    shown = "one seed" if seeds == 1 else f"mean over {seeds} seeds, shaded from the worst to the best"
    left.set(xlabel="round", ylabel=f"validation {words(metric)}")
    left.set_title(shown, fontsize=11)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.grid(alpha=0.3)
    left.legend(fontsize=10)
    if differences:
        colours = {label: COLOURS[k % len(COLOURS)] for k, label in enumerate(found)}
        for place, d in enumerate(differences):
            right.errorbar(
                d.mean, place, xerr=[[d.mean - d.low], [d.high - d.mean]], fmt="o" if d.decided else "s",
                color=colours[d.other], markerfacecolor=colours[d.other] if d.decided else "white", markersize=8,
                capsize=5, linewidth=2,
            )  # fmt: skip
        right.axvline(0, color="#444444", linewidth=1.2)
        names = [d.other if d.decided else f"{d.other}\n{d.verdict}" for d in differences]
        right.set_yticks(range(len(differences)), names, fontsize=10)
        right.set_ylim(len(differences) - 0.5, -0.5)
        right.set_xlabel(f"{words(metric)} ({which}): method minus {differences[0].reference}")
        right.set_title(f"paired difference to {differences[0].reference}, 95 % interval", fontsize=11)
        right.grid(alpha=0.3, axis="x")
    return saved(figure, path)


def _curve(axis: Any, found: Sequence[Result], colour: str, style: str, label: str) -> None:
    """The mean over runs by round, and the range around it; of the rounds that all have evaluated."""
    curves = [{line["round"]: line["metrics"][r.metric] for line in r.raw["history"] if line["metrics"]} for r in found]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[t] for curve in curves] for t in rounds]
    axis.plot(rounds, [sum(v) / len(v) for v in values], style, color=colour, label=label, linewidth=2)
    if len(found) > 1:
        axis.fill_between(rounds, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.1)
