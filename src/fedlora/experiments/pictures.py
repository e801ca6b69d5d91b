"""All pictures of experiments and comparisons, in one style. Needs matplotlib (`fedlora[plot]`).

curves   a score on validation by round, a panel a set-up     map      verdicts as colours, a row a question
dots     differences with intervals, a panel a set-up         budgets  scores by epsilon

As a file a picture is what was drawn, in the format of its name. Inside a page (`inline`) it is SVG, and each colour of
`PALETTE` a CSS variable, so that one drawing serves by day and by night; other colours, as those of the map, stay.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

from fedlora.core import files
from fedlora.errors import ConfigError
from fedlora.experiments.decision_words import MARKS, OUT, UNITS, mark
from fedlora.experiments.decisions import Answer, Answers
from fedlora.experiments.plan import mains
from fedlora.experiments.result import Result
from fedlora.experiments.scores import scale
from fedlora.experiments.spec import Experiment
from fedlora.experiments.tables import Budget, Difference, measured_by, paired, score_cells, smaller_is_better
from fedlora.runs.attack_words import attacks_of
from fedlora.runs.drawing import COLOURS, metadata, saved, under_attack, words

INK, MUTED, FAINT, GROUND = "#222222", "#5c5c5c", "#d9d9d9", "#ffffff"
# drawn colour -> (CSS variable, in the dark)
PALETTE = {
    INK: ("ink", "#e6e6e6"), MUTED: ("muted", "#a8a8a8"), FAINT: ("faint", "#444444"), GROUND: ("ground", "#16181c"),
    **{
        light.lower(): (f"c{k}", dark)
        for k, (light, dark) in enumerate(
            zip(
                COLOURS,
                ("#4fa8e0", "#f08a4b", "#2fc79a", "#e09cc4", "#f0b93a", "#8accf5", "#cfcfcf", "#f2e96b"),
                strict=True,
            )
        )
    },
}  # fmt: skip
STYLES = ("-", "--", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P")


def line_style(k: int) -> tuple[str, str]:
    """(colour, dashes) of the k-th line of a picture."""
    return COLOURS[k % len(COLOURS)], STYLES[k // len(COLOURS) % len(STYLES)]


@contextmanager
def drawn(size: float) -> Iterator[None]:
    """Within it figures have the colours of `PALETTE`, no ground of their own, and letters of that size."""
    style = {
        "font.size": size, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "axes.titlecolor": INK,
        "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
        "grid.color": FAINT, "axes.titlesize": size, "axes.labelsize": size, "legend.fontsize": size,
        "xtick.labelsize": size - 1, "ytick.labelsize": size - 1, "axes.spines.top": False, "axes.spines.right": False,
        "legend.frameon": False, "hatch.linewidth": 1.2,
    }  # fmt: skip
    with plt.rc_context(style):
        yield


def inline(figure: Figure, name: str, words: str) -> str:
    """The figure as an <svg> element, and closed. name: of its own on the page. words: for who does not see it."""
    figure.patch.set_visible(False)
    for axis in figure.axes:
        axis.patch.set_visible(False)
    made = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):  # names inside it are of this picture alone
        figure.savefig(made, format="svg", metadata={"Date": None})
    plt.close(figure)
    svg = made.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: css_colour(found[0]), svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{escape(words)}">'
    return head + svg[svg.index(">") + 1 :].strip()


def css_colour(colour: str) -> str:
    """The variable of a drawn colour, or the colour itself where it is none of `PALETTE`."""
    return f"var(--{PALETTE[colour.lower()][0]})" if colour.lower() in PALETTE else colour


def style_sheet() -> str:
    """The variables, in the light and in the dark."""
    light = " ".join(f"--{name}: {colour};" for colour, (name, _) in PALETTE.items())
    dark = " ".join(f"--{name}: {colour};" for name, colour in PALETTE.values())
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


# ---- curves ----------------------------------------------------------------------------------------------------------


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
    """Panels of what has been run and evaluated after several rounds. failed: as `plan.chosen_value` takes it."""
    axis_name = experiment.rows[0]
    found: dict[str, dict[str, dict[int, Result]]] = {}
    for run in mains(experiment, profile, results, failed):
        if run.digest in results and len(results[run.digest].history.evaluated) > 1:
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
    for place, (label, curve) in enumerate(curves.items()):
        colour, style = line_style(labels.index(label))
        rounds = sorted(set.intersection(*(set(each) for each in curve.values())))
        means = [fmean(each[t] for each in curve.values()) for t in rounds]
        marker = "o" if len(rounds) < 8 else ""
        wide = max(1.6, 3.4 - 0.4 * place)  # where two coincide, both are seen
        axis.plot(rounds, means, style, color=colour, label=label, linewidth=wide, marker=marker, markersize=3.5)
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
        seed: {t: value for t, value in result.history.curve(result.metric).items() if not math.isnan(value)}
        for seed, result in by_seed.items()
    }


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
    at = results[0].chance()
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
        if attacks := attacks_of([result.settings.model_dump() for result in runs]):
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


# ---- dots ------------------------------------------------------------------------------------------------------------

_REACH = 12.0  # margins from zero to the ends of the scale, at most; what lies beyond stands at the edge, by its number


@dataclass(frozen=True)
class Dots:
    """One set-up. rows: the other labels against the reference. up: 1 where more is better, else -1. reference: its own
    mean. chance: what guessing scores, None where the metric has none. margin: what is too small to matter, or 0."""

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
        """The numbers, for who does not see the picture."""
        told = [f"{d.other} {self.up * d.mean:+.4f}" for d in self.rows]
        return f"{self.title}, better than {self.label} by: {', '.join(told)}"


def dots(
    experiment: Experiment, profile: str, results: Mapping[str, Result], failed: Collection[str] = (),
    margins: Mapping[str, float] | None = None,
) -> list[Dots]:  # fmt: skip
    """A panel a set-up in which the reference and another label share two seeds. margins: score -> what is too small to
    matter, of the test set after the last round; that of another number or score is none of these."""
    reference, axis = experiment.reference, experiment.rows[0]
    which = experiment.profile(profile).metric or experiment.metric
    cells = score_cells(experiment, profile, results, failed=failed)
    metric = measured_by(cells)
    if reference is None or metric is None:
        return []
    up = -1.0 if smaller_is_better(which, metric) else 1.0
    margin = (margins or {}).get(metric, 0.0) if which == "test, last" else 0.0
    found: dict[str, list[Difference]] = {}
    for d in paired(cells, axis, reference):
        found.setdefault(", ".join(d.where.values()), []).append(d)
    means = {", ".join(label for name, label in cell.cell.items() if name != axis): cell.mean
             for cell in cells if cell.cell[axis] == reference}  # fmt: skip
    one = next(r for run in mains(experiment, profile, results, failed) if (r := run.result(results)) is not None)
    return [
        Dots(title, rows, up, metric, reference, means[title] or 0.0, one.chance(metric), margin)
        for title, rows in found.items()
    ]


def reach(panels: Sequence[Dots]) -> float:
    """Where the scale of all panels ends."""
    ends = sorted(max(abs(d.low), abs(d.high)) for panel in panels for d in panel.rows)
    margin = max(panel.margin for panel in panels)
    largest = ends[-1] if ends else 1.0
    return 1.08 * (min(largest, _REACH * margin) if margin else largest) or 1.0


def draw_dots(axis: Any, panel: Dots, end: float) -> None:
    """Right is better. A full dot's interval leaves out zero; the grey strip is within the margin; an arrow at the edge
    says that the dot lies beyond it."""
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
            axis.annotate("chance", (at, 0), xycoords=("data", "axes fraction"), xytext=(2, 2), color=MUTED,
                          textcoords="offset points", fontsize="small", rotation=90, va="bottom")  # fmt: skip
    axis.set_yticks(range(len(panel.rows)), [d.other for d in panel.rows])
    axis.set(xlim=(-end, end), ylim=(len(panel.rows) - 0.4, -0.6))
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.tick_params(axis="y", length=0)
    axis.grid(alpha=0.6, axis="x")
    axis.spines["left"].set_visible(False)


def _told(panel: Dots) -> str:
    by_chance = "" if panel.chance is None else f", chance {panel.chance:.3f}"
    name = "log-loss" if panel.metric == "loss" else panel.metric
    return f"{panel.label}: {name} {panel.reference:.3f}{by_chance}"


def dots_figure(panel: Dots, end: float) -> Figure:
    """One panel as a picture of its own."""
    figure: Figure
    figure, axis = plt.subplots(figsize=(3.6, 1.15 + 0.23 * len(panel.rows)), layout="constrained")
    draw_dots(axis, panel, end)
    figure.suptitle(panel.title, x=0.02, ha="left", fontweight="bold", fontsize=plt.rcParams["font.size"])
    axis.set_title(_told(panel), loc="right", color=MUTED, fontsize=plt.rcParams["font.size"] - 1)
    axis.set_xlabel(f"better by, {scale(panel.metric)}")
    return figure


def plot_dots(
    experiment: Experiment, profile: str, results: Mapping[str, Result], path: Path, failed: Collection[str] = (),
    margins: Mapping[str, float] | None = None,
) -> Path:  # fmt: skip
    """All panels in one picture, two beside each other, to be read at 400 points of width.

    Raises:
        ConfigError: there is no pair of results to draw.
    """
    panels = dots(experiment, profile, results, failed, margins)
    if not panels:
        raise ConfigError(
            f"experiment {experiment.name} has no result of profile {profile} to draw: it takes runs that were "
            f"evaluated after several rounds, or two seeds of the reference and of another label. Run more first."
        )
    end = reach(panels)
    with drawn(13):
        figure, axes = panel_grid(len(panels), 0.9 + 0.3 * max(len(panel.rows) for panel in panels))
        for k, (axis, panel) in enumerate(zip(axes, panels, strict=True)):
            draw_dots(axis, panel, end)
            axis.set_title(panel.title, loc="left", fontweight="bold")
            if k % 2 and [d.other for d in panel.rows] == [d.other for d in panels[k - 1].rows]:
                axis.set_yticklabels([])
        figure.supxlabel(f"better than {panels[0].label} by, {scale(panels[0].metric)}", fontsize=13)
        margin = panels[0].margin
        strip = f"; grey: within the margin {margin:g}" if margin else ""
        figure.suptitle(
            f"{wrapped(experiment.title, 56)}\npaired by seed, 95 % intervals; hollow: zero inside{strip}", fontsize=13
        )
        return saved(figure, path)


# ---- the map ---------------------------------------------------------------------------------------------------------

_MAP = "PuOr"  # orange to purple: told apart by everybody
_DARK, _LIGHT, _GREY = "#111111", "#fefefe", "#b9b9b9"  # in cells: the same by day and by night
_HATCH = "////"
_TITLE = 0.42  # of a row's height: the question stands above its cells, which so have the picture's whole width


def map_figure(found: Sequence[Answers]) -> Figure:
    """A row a question (first against second), a column a set-up: colour is the mean difference, with zero in the
    middle and the margin marked on the scale. Hatched: undecided. Struck: thrown out by the gate.

    The scale ends at the largest difference, but at four margins at least and at twelve at most: what is larger has the
    colour of its end, and its number. A verdict in brackets is of a gap below its margin. found: complete families of
    one experiment that go by one score.

    Raises:
        ValueError: the families go by several scores: one scale has one unit.
    """
    if len(scores := {one.family.metric for one in found}) > 1:
        raise ValueError(f"a map has one unit; these families go by {' and '.join(sorted(scores))}.")
    cells = {(a.question.first, a.question.second, a.question.setup): a for one in found for a in one.answers}
    setups = list(dict.fromkeys(setup for one in found for setup in one.family.setups))
    pairs = list(dict.fromkeys(pair for one in found for pair in one.family.pairs))
    unit, factor, _ = UNITS[found[0].family.metric]
    margins = sorted({one.family.margin * factor for one in found})
    sizes = [factor * abs(a.test.mean) for a in cells.values() if a.test is not None]
    end = min(12 * margins[-1], max([4 * margins[-1], *sizes]))
    norm = Normalize(-end, end)
    figure: Figure
    with drawn(14):
        figure = plt.figure(figsize=(7.2, 0.95 + 1.08 * len(pairs) + 1.75))
        top, bottom = 0.95 / figure.get_figheight(), 1.75 / figure.get_figheight()
        axis = figure.add_axes((0.0, bottom, 1.0, 1 - top - bottom))
        axis.set(xlim=(0, max(4, len(setups))), ylim=(len(pairs), 0))
        axis.set_axis_off()
        for x, setup in enumerate(setups):
            axis.text(x + 0.5, -0.06, wrapped(setup, 8), ha="center", va="bottom", linespacing=1.05)
        for y, (first, second) in enumerate(pairs):
            axis.text(0.03, y + _TITLE - 0.08, f"{first} against {second}", va="bottom", fontweight="bold")
            for x, setup in enumerate(setups):
                if (first, second, setup) in cells:
                    _draw_cell(axis, x, y + _TITLE, cells[first, second, setup], norm, factor)
                else:
                    axis.text(x + 0.5, y + (1 + _TITLE) / 2, "·", ha="center", va="center", color=MUTED)
        _scale(figure, norm, margins, unit)
        _keys(figure, below=any(answer.below_margin for answer in cells.values()))
    return figure


def plot_map(found: Sequence[Answers], path: Path) -> Path:
    """The figure as a file."""
    return saved(map_figure(found), path)


def _draw_cell(axis: Any, x: int, y: float, a: Answer, norm: Normalize, factor: float) -> None:
    """One cell. Its box carries the question as its name, and the hatching of an undecided one."""
    high = 1 - _TITLE
    middle = (x + 0.5, y + high / 2)
    name = a.question.words
    if a.test is None:
        axis.add_patch(Rectangle((x + 0.02, y), 0.96, high, facecolor=_GREY, edgecolor="none", gid=name))
        if a.why.startswith(OUT):
            axis.plot([x + 0.02, x + 0.98], [y + high, y], color=_DARK, linewidth=1.6, gid=f"struck: {name}")
        ground: dict[str, Any] | None = {"facecolor": _GREY, "edgecolor": "none", "pad": 1.5}
        words = "out" if a.why.startswith(OUT) else "failed"
        axis.text(*middle, words, ha="center", va="center", color=_DARK, bbox=ground)
        return
    mean = factor * a.test.mean
    colour = plt.get_cmap(_MAP)(norm(mean))
    undecided = a.verdict == "undecided"
    axis.add_patch(Rectangle(
        (x + 0.02, y), 0.96, high, facecolor=colour, edgecolor="#6a6a6a" if undecided else "none", linewidth=0,
        hatch=_HATCH if undecided else None, gid=name,
    ))  # fmt: skip
    dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 0.5
    ground = {"facecolor": colour, "edgecolor": "none", "pad": 1.5} if undecided else None
    digits = 3 if factor == 1.0 else 1
    axis.text(
        *middle, f"{mean + 0.0:+.{digits}f}\n{mark(a)}", ha="center", va="center", color=_LIGHT if dark else _DARK,
        bbox=ground, fontsize=16, linespacing=1.05,
    )  # fmt: skip


def _scale(figure: Figure, norm: Normalize, margins: Sequence[float], unit: str) -> None:
    """The colours from end to end, zero and the margins on them."""
    height = figure.get_figheight()
    axis = figure.add_axes((0.06, 1.18 / height, 0.88, 0.2 / height))
    figure.colorbar(plt.cm.ScalarMappable(norm, _MAP), cax=axis, orientation="horizontal")
    axis.spines[:].set_visible(False)
    for margin in margins:
        for at in (-margin, margin):
            axis.axvline(at, color=_DARK, linewidth=1.6)
    end = float(norm.vmax or 1.0)
    axis.set_xticks([-end, 0.0, end], [f"-{end:.2g}: second better", "0", f"first better: +{end:.2g}"])
    axis.get_xticklabels()[0].set_horizontalalignment("left")
    axis.get_xticklabels()[-1].set_horizontalalignment("right")
    axis.tick_params(length=0, pad=3)
    words = f"difference of {unit}; lines: ± margin, {' and '.join(f'{m:g}' for m in margins)}"
    axis.annotate(words, (0.5, 1.25), xycoords="axes fraction", ha="center", va="bottom", color=INK, fontsize=13)


def _keys(figure: Figure, *, below: bool) -> None:
    """below: whether a verdict is of a gap below the margin, which is then explained."""

    def bare(label: str) -> Patch:
        return Patch(facecolor="none", edgecolor="none", label=label)

    keys = [
        bare(f"{MARKS['better']} first better"),
        bare(f"{MARKS['worse']} second better"),
        bare(f"{MARKS['equivalent']} equivalent"),
        Patch(facecolor=FAINT, edgecolor=MUTED, hatch=_HATCH, label=f"{MARKS['undecided']} undecided"),
        Patch(facecolor=_GREY, edgecolor=MUTED, label="out: LoRA not shown to add"),
        bare("· not asked"),
        *([bare("( ) by less than the margin")] if below else []),
    ]
    figure.legend(handles=keys, loc="lower center", ncols=3, fontsize=13, columnspacing=0.8, handlelength=1.4)


# ---- budgets ---------------------------------------------------------------------------------------------------------

_PROMISES_NOTHING = 1000.0  # an epsilon beyond it stands at the picture's edge, by its label


def budget_figures(found: Sequence[Budget], lines: str) -> tuple[dict[str, Figure], list[dict[str, str]]]:
    """(score -> its panel as a picture of its own, what a page's legend shows)"""
    labels, figures = list(dict.fromkeys(cell.line for cell in found)), {}
    for score in ("accuracy", "loss"):
        figures[score], axis = plt.subplots(figsize=(4.6, 3.4), layout="constrained")
        _draw_budgets(axis, found, labels, score)
        axis.set_xlabel("epsilon (smaller: more private)")
    legend = [legend_entry(f"{label} {lines}", COLOURS[k % len(COLOURS)]) for k, label in enumerate(labels)]
    return figures, [*legend, legend_entry("without privacy", MUTED, "--")]


def plot_budgets(found: Sequence[Budget], title: str, lines: str, path: Path) -> Path:
    """Accuracy and log-loss by epsilon, a line for each label of `lines` with a band from the least to the largest
    seed. Dashed: the same federation without privacy. At the right edge: cells whose noise is next to none."""
    labels = list(dict.fromkeys(cell.line for cell in found))
    figure: Figure
    with drawn(14):  # to be read 400 pixels wide
        figure, axes = plt.subplots(2, 1, figsize=(7.6, 10.6), layout="constrained")
        for axis, score in zip(axes, ("accuracy", "loss"), strict=True):
            _draw_budgets(axis, found, labels, score)
        handles = [
            plt.Line2D([], [], color=colour, marker=marker, linewidth=2.5, markersize=9, label=f"{label} {lines}")
            for label, (colour, marker) in zip(labels, zip(COLOURS, _MARKERS, strict=False), strict=False)
        ]
        handles.append(plt.Line2D([], [], color=MUTED, linestyle="--", linewidth=2, label="without privacy"))
        figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=14)
        seeds = {cell.seeds for cell in found}
        of = f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{max(seeds)} seeds"
        figure.suptitle(f"{title}\nmean of {of}, shaded: from the least to the largest", fontsize=14)
        return saved(figure, path)


def _tenth_up(epsilon: float) -> float:
    """Where a tick stands: a promise is never understated. What is off by a rounding of floats alone stays."""
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
        x, low, high = [c.epsilon for c in on], *_ends_of(on, score)
        axis.plot(x, [c.mean(score) for c in on], color=colour, marker=marker, markersize=9, linewidth=2.5)
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        for cell in own[len(on) :]:  # noise next to none
            (least,), (largest,) = _ends_of([cell], score)
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


def _ends_of(cells: Sequence[Budget], score: str) -> tuple[list[float], list[float]]:
    spreads = [cell.spread(score) for cell in cells]
    return [low for low, _ in spreads], [high for _, high in spreads]


# ---- a comparison ----------------------------------------------------------------------------------------------------


def plot_comparison(
    runs: Mapping[str, Mapping[int, Result]],
    panels: Sequence[Dots],
    which: str,
    order: Sequence[str],
    paths: Sequence[Path],
) -> list[Path]:
    """Curves, where methods were evaluated after several rounds, above the differences to the reference, where there
    are several seeds. runs: label -> seed -> result. panels: of `dots`, of the number `which`. order: all labels,
    which give the colours. paths: a file each, in the format of its name. Of one seed and one evaluated round nothing
    is drawn.
    """
    curves = {label: each for label, each in runs.items() if all(len(r.history.evaluated) > 1 for r in each.values())}
    shown = [panel for panel in panels if panel.rows]
    if not curves and not shown:
        return []
    heights = [4.2] * bool(curves) + [1.2 + 0.36 * len(panel.rows) for panel in shown]
    figure: Figure
    with drawn(13):
        figure, axes = plt.subplots(
            len(heights),
            1,
            figsize=(7.2, sum(heights) + 0.4),
            height_ratios=heights,
            layout="constrained",
            squeeze=False,
        )
        column = list(axes[:, 0])
        if curves:
            axis, seeds = column.pop(0), max(map(len, curves.values()))
            draw_curves(axis, Panel("", curves), order)
            axis.set_title("one seed" if seeds == 1 else f"mean of {seeds} seeds; shaded: ± standard error")
            axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))  # beside the curves, over none of them
        for axis, panel in zip(column, shown, strict=True):
            draw_dots(axis, panel, reach([panel]))
            axis.set_title("difference paired by seed, 95 % interval; hollow: zero inside")
            axis.set_xlabel(f"better than {panel.label} by, {scale(panel.metric)} ({which})")
        if attacks := attacks_of([each.settings.model_dump() for by in runs.values() for each in by.values()]):
            under_attack(figure, "; ".join(attacks))
        return saved_all(figure, paths)


def saved_all(figure: Figure, paths: Sequence[Path]) -> list[Path]:
    """The figure in several formats."""
    for path in paths[:-1]:
        with files.replacing(path) as file:
            figure.savefig(file, dpi=130, format=path.suffix.removeprefix("."), metadata=metadata(path.suffix[1:]))
    return [*paths[:-1], saved(figure, paths[-1])]
