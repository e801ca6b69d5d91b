"""The map of verdicts: a row per question, a column per set-up, in the style of `pictures`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fedlora.experiments.decision_words import MARKS, OUT, UNITS, mark
from fedlora.experiments.decisions import Answer, Answers
from fedlora.experiments.picture_style import FAINT, INK, MUTED, drawn, wrapped

_MAP = "PuOr"  # orange to purple: everybody can distinguish them
_DARK, _LIGHT, _GREY = "#111111", "#fefefe", "#b9b9b9"  # in cells: the same by day and by night
_HATCH = "////"
_TITLE = 0.42  # of a row's height: the question is above its cells, which then have the picture's whole width


@drawn
def map_figure(found: Sequence[Answers]) -> Figure:
    """A row per question (first against second), a column per set-up: colour is the mean difference, with zero in the
    middle and the margin marked on the scale. Hatched: undecided. Struck: discarded by the gate.

    The scale ends at the largest difference, but between four and twelve margins; a larger one has the colour of the
    end, and its number. A verdict in brackets means a gap below the margin. found: complete families of one experiment
    with one score.
    """
    cells = {(a.question.first, a.question.second, a.question.setup): a for one in found for a in one.answers}
    setups = list(dict.fromkeys(setup for one in found for setup in one.family.setups))
    pairs = list(dict.fromkeys(pair for one in found for pair in one.family.pairs))
    unit = UNITS[found[0].family.metric]
    factor = unit.factor
    margins = sorted({one.family.margin * factor for one in found})
    sizes = [factor * abs(a.test.mean) for a in cells.values() if a.test is not None]
    end = min(12 * margins[-1], max([4 * margins[-1], *sizes]))
    norm = Normalize(-end, end)
    figure: Figure = plt.figure(figsize=(7.2, 0.95 + 1.08 * len(pairs) + 1.75))
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
    _scale(figure, norm, margins, unit.words)
    _keys(figure, below=any(answer.below_margin for answer in cells.values()))
    return figure


def _draw_cell(axis: Any, x: int, y: float, a: Answer, norm: Normalize, factor: float) -> None:
    """Draw one cell. Its box is named after the question, and hatched if undecided."""
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
    """Draw the colours from end to end, with zero and the margins."""
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
    """below: some verdict's gap is below the margin, which the legend then explains."""

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
