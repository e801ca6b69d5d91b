"""All pictures of experiments and comparisons, in one style. Needs matplotlib (`fedlora[plot]`).

curves       a score on validation by round, a panel per set-up
dots         differences with intervals, a panel per set-up
budgets      scores by epsilon
comparison   of methods: curves above differences

Each is one figure, readable at 400 points of width: as a file (`saved`), or inside a page (`inline`).
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ParamSpec, TypeVar

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

from fedlora.experiments.budgets import Budget, spendings
from fedlora.experiments.grid import Grid
from fedlora.experiments.result import Result
from fedlora.experiments.scores import scale
from fedlora.experiments.tables import OWN_DATA, Difference, paired, score_cells
from fedlora.runs.attack_words import attacks_of
from fedlora.runs.drawing import COLOURS, saved, under_attack, words

P = ParamSpec("P")
R = TypeVar("R")
INK, MUTED, FAINT, GROUND = "#222222", "#5c5c5c", "#d9d9d9", "#ffffff"
_SHORT = 24  # letters of a label: two labels fit side by side
_STYLES, _MARKERS = ("-", "--", ":"), ("o", "s", "^", "D", "v", "P")
_STYLE = {
    "font.size": 13, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "axes.titlecolor": INK,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "grid.color": FAINT,
    "axes.titlesize": 13, "axes.labelsize": 13, "legend.fontsize": 13, "xtick.labelsize": 12, "ytick.labelsize": 12,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "hatch.linewidth": 1.2,
}  # fmt: skip


def drawn(draw: Callable[P, R]) -> Callable[P, R]:
    """A drawing function, in our style."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        with plt.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return styled


def inline(figure: Figure, words: str) -> str:
    """The figure as an <svg> element; it closes the figure. words: unique on the page, for those who cannot see it."""
    made = io.StringIO()
    ours = {"svg.fonttype": "none", "svg.hashsalt": words}  # makes ids unique to this picture
    with plt.rc_context(_STYLE | ours):
        figure.savefig(made, format="svg", metadata={"Date": None})
    plt.close(figure)
    svg = made.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{escape(words)}">'
    return head + svg[svg.index(">") + 1 :].strip()


@drawn
def save(figure: Figure, *paths: Path) -> list[Path]:
    """Save the figure as files, each in the format of its name, and close it."""
    return [saved(figure, path) for path in paths]


def line_style(k: int) -> tuple[str, str]:
    """(colour, dashes) of the k-th line of a picture."""
    return COLOURS[k % len(COLOURS)], _STYLES[k // len(COLOURS) % len(_STYLES)]


def _panels(count: int, height: float) -> tuple[Figure, list[Any]]:
    """(figure, as many axes), two per row."""
    columns = min(2, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(7.2, height * rows + 1.4), layout="constrained", squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, list(axes.flat[:count])


def wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Draw the legend below all panels, over none; long labels in one column, and on several lines."""
    labels = [wrapped(handle.get_label(), 60) for handle in handles]
    columns = 2 if max(map(len, labels)) <= _SHORT else 1
    figure.legend(handles=handles, labels=labels, loc="outside lower center", ncols=columns)


def figure_of(grid: Grid, margins: Mapping[str, float] | None = None) -> Figure | None:
    """The picture of an experiment: scores by epsilon, curves, or dots if runs were merged or evaluated once; None if
    there is nothing to draw. margins: score -> the largest difference that does not matter, if decided."""
    experiment = grid.experiment
    if experiment.budgets is not None:
        found = spendings(grid)
        return budgets_figure(found, experiment.title, experiment.budgets.lines) if found else None
    drawing = None if experiment.merged else curves_figure(grid, experiment.reference if margins else None)
    return drawing or dots_figure(grid, margins)


def _without(grid: Grid) -> str:
    """A line of a title that names labels without a result."""
    there = {run.cell[grid.rows] for run, _ in grid.used}
    cells = grid.experiment.cells(grid.profile)
    gone = dict.fromkeys(cell[grid.rows] for cell in cells if cell[grid.rows] not in there)
    return f"\n{wrapped('no result: ' + ', '.join(gone), 56)}" if gone else ""


# ---- curves ----------------------------------------------------------------------------------------------------------

Lines = Mapping[str, Mapping[int, Result]]  # label of the first row axis -> seed -> result
_BANDS = 5  # the most shaded lines in a panel: more overlap to a brown in which none is visible


def curves_of(grid: Grid) -> dict[str, dict[str, dict[int, Result]]]:
    """The other labels -> lines, for runs that were evaluated after several rounds; a panel has one metric, on one kind
    of data."""
    found: dict[str, dict[str, dict[int, Result]]] = {}
    kinds = {
        run.digest: words(result.metric) + (OWN_DATA if result.on_own_data("validation, best") else "")
        for run, result in grid.used
    }
    for run, result in grid.used:
        if len(result.history.evaluated) > 1:
            where = [label for axis, label in run.cell.items() if axis != grid.rows]
            title = ", ".join([*where, *([kinds[run.digest]] if len({*kinds.values()}) > 1 else [])])
            found.setdefault(title, {}).setdefault(run.cell[grid.rows], {})[run.seed] = result
    return found


@drawn
def curves_figure(grid: Grid, against: str | None = None) -> Figure | None:
    """All panels of an experiment; None if nothing was evaluated after several rounds. against: see `_draw_curves`."""
    if not (panels := curves_of(grid)):
        return None
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    figure, axes = _panels(len(panels), 3.1)
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        _draw_curves(axis, lines, labels, against)
        axis.set_title(title, loc="left", fontweight="bold")
    _legend(figure, _handles(labels, list(panels.values())))
    seeds = sorted({len(by_seed) for lines in panels.values() for by_seed in lines.values()})
    of = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    shaded = f"95 % interval of the gap to {against}" if against else "± standard error"
    bands = f"\nshaded: {shaded}" if any(len(p) <= _BANDS for p in panels.values()) and seeds[-1] > 1 else ""
    figure.suptitle(f"{wrapped(grid.experiment.title, 56)}\nmean of {of} seeds{bands}{_without(grid)}", fontsize=13)
    if attacks := attacks_of([result.settings.model_dump() for _, result in grid.used]):
        under_attack(figure, f"some of these runs, by {'; '.join(attacks)}")
    return figure


def _handles(labels: Sequence[str], panels: Sequence[Lines]) -> list[Any]:
    """The legend's handles. A line that coincides with another in every panel says so."""
    values = {
        label: [{seed: result.history.curve(result.metric) for seed, result in lines[label].items()}
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


def _draw_curves(axis: Any, lines: Lines, labels: Sequence[str], against: str | None = None) -> None:
    """The validation metric by round, a line per label: means over seeds. labels: of all panels, for the colours.

    Few lines are shaded: with `against`, a label, by the 95 % interval of the gap to it, paired by seed, so that a line
    differs from that one where its band excludes it; otherwise by the mean's standard error.
    """
    curves = {label: _by_round(by_seed) for label, by_seed in lines.items()}
    for place, (label, curve) in enumerate(curves.items()):
        colour, style = line_style(labels.index(label))
        rounds = sorted(set.intersection(*(set(each) for each in curve.values())))
        means = [fmean(each[t] for each in curve.values()) for t in rounds]
        marker = "o" if len(rounds) < 8 else ""
        wide = max(1.6, 3.4 - 0.4 * place)  # if two coincide, both are visible
        axis.plot(rounds, means, style, color=colour, label=label, linewidth=wide, marker=marker, markersize=3.5)
        if len(lines) <= _BANDS and label != against:
            zero = {seed: dict.fromkeys(rounds, 0.0) for seed in curve}
            reference = curves.get(against, {}) if against else zero
            ends = [_band(curve, reference, t, m, paired=bool(against)) for t, m in zip(rounds, means, strict=True)]
            axis.fill_between(rounds, *zip(*ends, strict=True), color=colour, alpha=0.16, linewidth=0)
    first = next(result for by_seed in lines.values() for result in by_seed.values())
    chance = _chance_line(axis, first.chance())
    axis.set(
        xlabel=f"round{chance}", ylabel=f"validation {'log-loss' if first.metric == 'loss' else words(first.metric)}"
    )
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(5))
    axis.grid(alpha=0.6)


def _by_round(by_seed: Mapping[int, Result]) -> dict[int, dict[int, float]]:
    """Seed -> round -> value, for evaluations that gave a number."""
    return {
        seed: {t: value for t, value in result.history.curve(result.metric).items() if not math.isnan(value)}
        for seed, result in by_seed.items()
    }


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


def _chance_line(axis: Any, at: float | None) -> str:
    """Draw a line at the score of guessing, unless that would flatten the others. Returns the words about it for an
    axis's label, because words inside the panel would overlap curves."""
    if at is None:
        return ""
    low, high = axis.get_ylim()
    if low - 0.8 * (high - low) <= at <= high + 0.8 * (high - low):
        axis.axhline(at, color=MUTED, linestyle=(0, (2, 2)), linewidth=1.2)
        return f" (dotted: chance {at:.3g})"
    return f" (chance {at:.3g} lies {'above' if at > high else 'below'})"


# ---- dots ------------------------------------------------------------------------------------------------------------

_REACH = 12.0  # the most margins from zero to the scale's ends; a dot beyond is at the edge, with its number


@dataclass(frozen=True)
class Dots:
    """One set-up. rows: the other labels against the reference. up: 1 if more is better, otherwise -1. reference: its
    own mean. chance: the score of guessing, None if the metric has none. margin: what is too small to matter, or 0."""

    title: str
    rows: Sequence[Difference]
    up: float
    metric: str
    label: str
    reference: float
    chance: float | None
    margin: float

    @property
    def words(self) -> str:
        """The reference in words."""
        by_chance = "" if self.chance is None else f", chance {self.chance:.3f}"
        return f"{self.label}: {'log-loss' if self.metric == 'loss' else self.metric} {self.reference:.3f}{by_chance}"


def dots_of(grid: Grid, margins: Mapping[str, float] | None = None) -> list[Dots]:
    """A panel for each set-up in which the reference and another label share two seeds. margins: score -> what is too
    small to matter on the test set after the last round; they do not apply to other numbers or scores."""
    reference, cells = grid.experiment.reference, score_cells(grid)
    if reference is None or not grid.used:
        return []
    known = (margins or {}) if grid.which() == "test, last" else {}
    found: dict[str, list[Difference]] = {}
    for d in paired(cells, grid.rows, reference):
        found.setdefault(", ".join(d.where.values()), []).append(d)
    at = {", ".join(label for name, label in cell.cell.items() if name != grid.rows): cell
          for cell in cells if cell.cell[grid.rows] == reference}  # fmt: skip
    classes = grid.used[0][1]
    return [
        Dots(title, rows, -1.0 if at[title].less else 1.0, metric, reference, at[title].mean or 0.0,
             classes.chance(metric), known.get(metric, 0.0))
        for title, rows in found.items()
        if (metric := at[title].metric) is not None
    ]  # fmt: skip


@drawn
def dots_figure(grid: Grid, margins: Mapping[str, float] | None = None) -> Figure | None:
    """All panels of an experiment; None if there is no pair of results."""
    if not (panels := dots_of(grid, margins)):
        return None
    metrics = dict.fromkeys(panel.metric for panel in panels)
    ends = {metric: _reach([panel for panel in panels if panel.metric == metric]) for metric in metrics}
    figure, axes = _panels(len(panels), 1.4 + 0.3 * max(len(panel.rows) for panel in panels))
    for k, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
        _draw_dots(axis, panel, ends[panel.metric])
        axis.set_xlabel(wrapped(panel.words, 30), color=MUTED, fontsize=11)
        axis.set_title(panel.title, loc="left", fontweight="bold")
        if k % 2 and [d.other for d in panel.rows] == [d.other for d in panels[k - 1].rows]:
            axis.set_yticklabels([])
    units = " or ".join(map(scale, metrics))
    figure.supxlabel(wrapped(f"better than {panels[0].label} by, {units}", 56), fontsize=13)
    strip = f"; grey: within the margin {panels[0].margin:g}" if panels[0].margin else ""
    title = wrapped(grid.experiment.title, 56)
    told = wrapped(f"paired by seed, 95 % intervals; hollow: zero inside{strip}{_dotted(panels, ends)}", 56)
    figure.suptitle(f"{title}\n{told}{_without(grid)}", fontsize=13)
    return figure


def _reach(panels: Sequence[Dots]) -> float:
    """The end of the scale of all panels."""
    ends = sorted(max(abs(d.low), abs(d.high)) for panel in panels for d in panel.rows)
    margin = max(panel.margin for panel in panels)
    largest = ends[-1] if ends else 1.0
    return 1.08 * (min(largest, _REACH * margin) if margin else largest) or 1.0


def _dotted(panels: Sequence[Dots], ends: Mapping[str, float]) -> str:
    """A title's words about the lines at the score of guessing, if one is drawn. ends: metric -> end of its scale."""
    gaps = [(panel.metric, abs(panel.chance - panel.reference)) for panel in panels if panel.chance is not None]
    drawn = any(gap <= ends[metric] for metric, gap in gaps)
    return "; dotted: chance" if drawn else ""


def _draw_dots(axis: Any, panel: Dots, end: float) -> None:
    """Draw one panel; right is better. A full dot's interval excludes zero; the grey strip is within the margin; an
    arrow at the edge marks a dot beyond it."""
    if panel.margin:
        axis.axvspan(-panel.margin, panel.margin, color=FAINT, alpha=0.55, linewidth=0, zorder=0)
    axis.axvline(0, color=INK, linewidth=1.2, zorder=1)
    for y, d in enumerate(panel.rows):
        mean, (low, high) = panel.up * d.mean, sorted((panel.up * d.low, panel.up * d.high))
        if abs(mean) > end:
            side = 1 if mean > 0 else -1
            axis.annotate(
                f"{mean:+.3f}", (side * end, y), (side * 0.72 * end, y), va="center", fontsize="small",
                ha="right" if side > 0 else "left", color=MUTED, arrowprops={"arrowstyle": "->", "color": COLOURS[0]},
            )  # fmt: skip
            continue
        axis.plot([max(low, -end), min(high, end)], [y, y], color=COLOURS[0], linewidth=2, solid_capstyle="butt")
        axis.plot([mean], [y], "o", color=COLOURS[0], markersize=6, markeredgewidth=1.6,
                  markerfacecolor=COLOURS[0] if d.decided else GROUND)  # fmt: skip
    if panel.chance is not None:
        at = panel.up * (panel.chance - panel.reference)
        if abs(at) <= end:
            axis.axvline(at, color=MUTED, linestyle=(0, (2, 2)), linewidth=1.2)
    axis.set_yticks(range(len(panel.rows)), [wrapped(d.other, _SHORT) for d in panel.rows])
    axis.set(xlim=(-end, end), ylim=(len(panel.rows) - 0.4, -0.6))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.tick_params(axis="y", length=0)
    axis.grid(alpha=0.6, axis="x")
    axis.spines["left"].set_visible(False)


# ---- budgets ---------------------------------------------------------------------------------------------------------

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
        for label, (colour, marker) in zip(labels, zip(COLOURS, _MARKERS, strict=False), strict=False)
    ]
    handles.append(plt.Line2D([], [], color=MUTED, linestyle="--", linewidth=2, label="without privacy"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    seeds = {cell.seeds for cell in found}
    of = f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{max(seeds)} seeds"
    figure.suptitle(f"{title}\nmean of {of}, shaded: from the least to the largest", fontsize=13)
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
        colour, marker = COLOURS[k % len(COLOURS)], _MARKERS[k % len(_MARKERS)]
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


# ---- a comparison ----------------------------------------------------------------------------------------------------


@drawn
def comparison_figure(grid: Grid, order: Sequence[str]) -> Figure | None:
    """Curves, if methods were evaluated after several rounds, above the differences to the reference, if there are
    several seeds. order: all labels, which determine the colours. None for one seed and one evaluated round."""
    curves = curves_of(grid)
    shown = [panel for panel in dots_of(grid) if panel.rows]
    if not curves and not shown:
        return None
    labels = {label for lines in curves.values() for label in lines}
    heights = [4.2] * len(curves) + [
        1.2 + 0.22 * sum(2 + len(d.other) // _SHORT for d in panel.rows) for panel in shown
    ]
    size = {"figsize": (7.2, sum(heights) + 0.4 + 0.25 * len(labels)), "height_ratios": heights}
    figure: Figure
    figure, axes = plt.subplots(len(heights), 1, layout="constrained", squeeze=False, **size)
    column = list(axes[:, 0])
    for title, lines in curves.items():
        axis, seeds = column.pop(0), max(map(len, lines.values()))
        _draw_curves(axis, lines, order)
        told = "one seed" if seeds == 1 else f"mean of {seeds} seeds; shaded: ± standard error"
        axis.set_title("\n".join([*([wrapped(title, 56)] if title else []), told]))
    if curves:
        handles = _handles(order, list(curves.values()))
        _legend(figure, [handle for label, handle in zip(order, handles, strict=True) if label in labels])
    for axis, panel in zip(column, shown, strict=True):
        end = _reach([panel])
        _draw_dots(axis, panel, end)
        dotted = _dotted([panel], {panel.metric: end})
        axis.set_title(f"paired by seed, 95 % interval; hollow: zero inside{dotted}", loc="right")
        axis.set_xlabel(wrapped(f"better than {panel.label} by, {scale(panel.metric)} ({grid.which()})", 56))
    if gone := _without(grid):
        figure.suptitle(gone.strip(), fontsize=13)
    if attacks := attacks_of([result.settings.model_dump() for _, result in grid.used]):
        under_attack(figure, "; ".join(attacks))
    return figure
