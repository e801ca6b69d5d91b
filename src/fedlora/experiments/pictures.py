"""Pictures of experiments, from their stored results. Needs matplotlib (`fedlora[plot]`)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.errors import ConfigError
from fedlora.experiments.plan import mains
from fedlora.experiments.spec import Experiment
from fedlora.experiments.pictures import MUTED, css_colour, drawn, line_style
from fedlora.experiments.result import Result
from fedlora.experiments.tables import Difference
from fedlora.experiments.result import chance
from fedlora.runs.attack_words import attacks_of
from fedlora.runs.drawing import COLOURS, saved, under_attack, words


@dataclass(frozen=True)
class Panel:
    """One combination of labels but those of the first row axis. lines: label of that axis -> seed -> result."""

    title: str
    lines: Mapping[str, Mapping[int, Result]]

    @property
    def words(self) -> str:
        """Where its lines end, for who does not see them."""
        ends = [f"{label} {fmean(ends):.4f}" for label, by_seed in self.lines.items() if (ends := _ends(by_seed))]
        return f"{self.title or 'all'}, validation after the last round: {', '.join(ends)}"


_BANDS = 5  # lines of one panel that are shaded: more pile up to a brown in which none is seen


def curve_panels(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = ()
) -> list[Panel]:
    """Panels of what has been run and has rounds. failed: as `plan.chosen_value` takes it."""
    axis_name = experiment.rows[0]
    found: dict[str, dict[str, dict[int, Result]]] = {}
    for run in mains(experiment, profile, results, failed):
        if run.digest in results and any(line["metrics"] for line in results[run.digest].raw["history"]):
            title = ", ".join(label for axis, label in run.cell.items() if axis != axis_name)
            found.setdefault(title, {}).setdefault(run.cell[axis_name], {})[run.seed] = results[run.digest]
    return [Panel(title, lines) for title, lines in found.items()]


def labels_of(panels: Sequence[Panel]) -> list[str]:
    """All lines' labels, in the order in which they have colours."""
    return list(dict.fromkeys(label for panel in panels for label in panel.lines))


def legend_of(panels: Sequence[Panel]) -> tuple[list[str], list[dict[str, str]]]:
    """(labels, what a page's legend shows of them)"""
    labels = labels_of(panels)
    return labels, [legend_entry(label, *line_style(k)) for k, label in enumerate(labels)]


def legend_entry(label: str, colour: str, style: str = "-") -> dict[str, str]:
    return {"label": label, "colour": css_colour(colour), "dashes": {"--": "7 3", ":": "2 3"}.get(style, "none")}


def draw_curves(axis: Any, panel: Panel, labels: Sequence[str], against: str | None = None) -> None:
    """The validation metric by round, a line a label: means over seeds. labels: of all panels, for the colours.

    Shaded, of few lines: with `against`, a label, the 95 % interval of the gap to it, paired by seed, so that a line is
    told apart from that one where its band leaves it out; else the mean's standard error.
    """
    curves = {label: _by_round(by_seed) for label, by_seed in panel.lines.items()}
    for label, curve in curves.items():
        colour, style = line_style(labels.index(label))
        rounds = sorted(set.intersection(*(set(each) for each in curve.values())))
        means = [fmean(each[t] for each in curve.values()) for t in rounds]
        marker = "o" if len(rounds) < 8 else ""
        axis.plot(rounds, means, style, color=colour, label=label, linewidth=1.8, marker=marker, markersize=3.5)
        if len(panel.lines) <= _BANDS and label != against:
            reference = (
                curves.get(against or "", {}) if against else {seed: dict.fromkeys(rounds, 0.0) for seed in curve}
            )
            ends = [_band(curve, reference, t, m, paired=bool(against)) for t, m in zip(rounds, means, strict=True)]
            axis.fill_between(rounds, *zip(*ends, strict=True), color=colour, alpha=0.16, linewidth=0)
    results = [result for by_seed in panel.lines.values() for result in by_seed.values()]
    _chance_line(axis, results)
    axis.set(xlabel="round", ylabel=f"validation {_axis_words(results[0].metric)}")
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.grid(alpha=0.6)


def _by_round(by_seed: Mapping[int, Result]) -> dict[int, dict[int, float]]:
    """Seed -> round -> value, of evaluations that gave a number."""
    return {
        seed: {line["round"]: value for line in result.raw["history"]
               if line["metrics"] and (value := line["metrics"].get(result.metric)) is not None}
        for seed, result in by_seed.items()
    }  # fmt: skip


def _ends(by_seed: Mapping[int, Result]) -> list[float]:
    return [curve[max(curve)] for curve in _by_round(by_seed).values() if curve]


def _band(
    curve: Mapping[int, Mapping[int, float]], reference: Mapping[int, Mapping[int, float]], t: int, mean: float, *,
    paired: bool,
) -> tuple[float, float]:  # fmt: skip
    gaps = [curve[seed][t] - reference[seed][t] for seed in curve if t in reference.get(seed, {})]
    if len(gaps) < 2:
        return mean, mean
    half = stdev(gaps) / math.sqrt(len(gaps))
    if paired:
        from scipy import stats

        half *= float(stats.t.ppf(0.975, len(gaps) - 1))
    return mean - half, mean + half


def _chance_line(axis: Any, results: Sequence[Result]) -> None:
    """Where guessing is: a line, or, where that would flatten the others, words."""
    at = chance(results[0])
    if at is None:
        return
    low, high = axis.get_ylim()
    if low - 0.8 * (high - low) <= at <= high + 0.8 * (high - low):
        axis.axhline(at, color=MUTED, linestyle=(0, (2, 2)), linewidth=1.2)
        axis.annotate(f"chance {at:.3g}", (1, at), xycoords=("axes fraction", "data"), xytext=(0, 2),
                      textcoords="offset points", ha="right", va="bottom", color=MUTED, fontsize="small")  # fmt: skip
        axis.margins(y=0.08)
        return
    where, side = ("above", "top") if at > high else ("below", "bottom")
    axis.annotate(f"chance {at:.3g} lies {where}", (0.98, 0.98 if at > high else 0.02), xycoords="axes fraction",
                  ha="right", va=side, color=MUTED, fontsize="small")  # fmt: skip


def _axis_words(metric: str) -> str:
    return "log-loss" if metric == "loss" else words(metric)


def curve_figure(panel: Panel, labels: Sequence[str], against: str | None = None) -> Figure:
    """One panel as a picture of its own, for a page that puts as many side by side as there is room."""
    figure: Figure
    figure, axis = plt.subplots(figsize=(3.5, 2.7), layout="constrained")
    draw_curves(axis, panel, labels, against)
    if panel.title:
        axis.set_title(panel.title, loc="left", fontweight="bold")
    return figure


def plot_curves(
    experiment: Experiment,
    profile: str,
    results: Mapping[str, Result],
    path: Path,
    failed: Collection[str] = (),
    against: str | None = None,
) -> Path:
    """All panels in one picture, two beside each other, to be read at 400 points of width.

    Raises:
        ConfigError: no run of it that has rounds is there.
    """
    panels = curve_panels(experiment, profile, results, failed)
    if not panels:
        raise ConfigError(f"experiment {experiment.name} has no result of profile {profile}; run some first.")
    labels = labels_of(panels)
    shaded = "95 % interval of the gap to " + against if against else "± standard error"
    with drawn(13):
        figure, axes = panel_grid(len(panels), 3.1)
        for axis, panel in zip(axes, panels, strict=True):
            draw_curves(axis, panel, labels, against)
            axis.set_title(panel.title, loc="left", fontweight="bold")
        handles = [
            plt.Line2D([], [], color=colour, linestyle=style, linewidth=2.5, label=label)
            for label, (colour, style) in zip(labels, map(line_style, range(len(labels))), strict=True)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
        seeds = sorted({len(by_seed) for panel in panels for by_seed in panel.lines.values()})
        of = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        bands = f"\nshaded: {shaded}" if any(len(p.lines) <= _BANDS for p in panels) and seeds[-1] > 1 else ""
        figure.suptitle(f"{wrapped(experiment.title, 56)}\nmean of {of} seeds{bands}", fontsize=13)
        runs = [result for panel in panels for by_seed in panel.lines.values() for result in by_seed.values()]
        if attacks := attacks_of([result.raw["config"] for result in runs]):
            under_attack(figure, f"some of these runs, by {'; '.join(attacks)}")
        return saved(figure, path)


def panel_grid(count: int, height: float) -> tuple[Figure, list[Any]]:
    """(figure, as many axes), two in a row."""
    columns = min(2, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7.2, height * rows + 1.4), layout="constrained", squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, list(axes.flat[:count])


def wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


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
