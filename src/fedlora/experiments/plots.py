"""Pictures of experiments, from their stored results. Needs matplotlib (`fedlora[plot]`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, BinaryIO

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.experiments.plan import mains
from fedlora.experiments.results import Result
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tables import Difference
from fedlora.runs.attack_words import attacks_of
from fedlora.runs.plots import COLOURS, saved, under_attack, words


def plot_curves(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    path: Path | BinaryIO,
    failed: Collection[str] = (),
) -> Path | BinaryIO:
    """The validation metric by round, a panel for each combination of labels but the first row axis, a line a label of
    that: means over seeds, with their standard errors. failed: as `plan.chosen_value` takes it."""
    axis_name = experiment.rows[0]
    runs = [run for run in mains(experiment, profile, results, failed) if run.digest in results]
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
    figure.suptitle(f"{experiment.title}: mean over seeds, shaded: ± standard error", fontsize=11)
    if attacks := attacks_of([results[run.digest].raw["config"] for run in runs]):
        under_attack(figure, f"some of these runs, by {'; '.join(attacks)}")
    if isinstance(path, Path):
        return saved(figure, path)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def plot_comparison(
    runs: Mapping[str, Mapping[int, Result]],
    differences: Sequence[Difference],
    which: str,
    path: Path,
) -> Path:
    """Left: the validation metric by round, a line a method with its standard error over seeds. Right, where there are
    several seeds: the paired differences of `which` to the reference with their 95 % intervals."""
    found = {label: list(by_seed.values()) for label, by_seed in runs.items()}
    colours = {label: COLOURS[k % len(COLOURS)] for k, label in enumerate(found)}
    styles = {label: ("-", "--", ":")[k // len(COLOURS) % 3] for k, label in enumerate(found)}
    metric = words(next(iter(found.values()))[0].metric)
    seeds = max(len(runs) for runs in found.values())
    figure: Figure
    with plt.rc_context({"font.size": 13}):  # to be read at half its size
        height = max(4.6, 1.6 + 0.5 * len(found))
        panels, width = (2, 13.0) if differences else (1, 7.5)
        figure, axes = plt.subplots(1, panels, figsize=(width, height), layout="constrained", squeeze=False)
        left, right = axes[0][0], axes[0][-1]
        for label, each in found.items():
            _curve(left, each, colours[label], styles[label], f"{label} ({each[0].raw['target']})")
        left.set(xlabel="round", ylabel=f"validation {metric}")
        left.set_title("one seed" if seeds == 1 else f"mean of {seeds} seeds; shaded: ± standard error")
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.grid(alpha=0.3)
        left.legend(fontsize=11)
        if differences:
            _intervals(right, differences, colours)
            right.set_xlabel(f"{metric} ({which}), method minus {differences[0].reference}")
        if attacks := attacks_of([each.raw["config"] for by_seed in runs.values() for each in by_seed.values()]):
            under_attack(figure, "; ".join(attacks))
        saved(figure, path)
    return path


def _intervals(axis: Any, differences: Sequence[Difference], colours: Mapping[str, str]) -> None:
    """A line a method with its 95 % interval around the mean difference; hollow where zero is inside."""
    for place, d in enumerate(differences):
        colour = colours[d.other]
        axis.errorbar(
            d.mean, place, xerr=[[d.mean - d.low], [d.high - d.mean]], fmt="o", color=colour, capsize=6, linewidth=2.5,
            markersize=10, markeredgewidth=2.5, markerfacecolor=colour if d.decided else "white",
        )  # fmt: skip
    axis.axvline(0, color="#444444", linewidth=1.5)
    axis.set_yticks(range(len(differences)), [f"{d.other}\n{d.verdict}".strip() for d in differences])
    axis.set_ylim(len(differences) - 0.5, -0.5)
    axis.set_title("difference paired by seed, 95 % interval")
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.grid(alpha=0.3, axis="x")


def _curve(axis: Any, found: Sequence[Result], colour: str, style: str, label: str) -> None:
    """The mean over runs by round, with a band of one standard error (the range of the runs would hide the lines of
    other methods); of the rounds that all have evaluated."""
    curves = [{line["round"]: line["metrics"][r.metric] for line in r.raw["history"] if line["metrics"]} for r in found]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[t] for curve in curves] for t in rounds]
    means = [fmean(v) for v in values]
    axis.plot(rounds, means, style, color=colour, label=label, linewidth=2)
    if len(found) > 1:
        errors = [stdev(v) / math.sqrt(len(v)) for v in values]
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axis.fill_between(rounds, low, high, color=colour, alpha=0.12, linewidth=0)
