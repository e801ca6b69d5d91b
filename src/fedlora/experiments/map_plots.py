"""The map as pictures: a heat map of paired differences, and what GLoRA's rank budget does in each set-up.

Needs matplotlib (`fedlora[plot]`). Drawn to be read at half size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

import matplotlib.pyplot as plt
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fedlora.experiments.decision_words import UNITS
from fedlora.experiments.decisions import Answer, Answers, Scores
from fedlora.experiments.spec import Experiment
from fedlora.experiments.verdicts import weigh
from fedlora.runs.plots import COLOURS, saved

_COLOURS = "PuOr"  # orange to purple: told apart by everybody
_EMPTY = "#e8e8e8"


def plot_map(found: Sequence[Answers], path: Path | BinaryIO) -> None:
    """A row a set-up, a column a pair, of one experiment: colour is the mean difference, hatching an undecided one, a
    box of its own an equivalent one. What has no number says why.

    The scale ends at the largest difference, but at four margins at least and at twelve at most: what is larger has the
    colour of its end, and its number.
    """
    cells = {(a.question.setup, _pair(a)): (one, a) for one in found for a in one.answers}
    waiting = {(q.setup, f"{q.first}\nagainst\n{q.second}"): one
               for one in found if not one.complete for q in one.family.questions}  # fmt: skip
    setups = list(dict.fromkeys(setup for one in found for setup in one.family.setups))
    pairs = list(dict.fromkeys(f"{a}\nagainst\n{b}" for one in found for a, b in one.family.pairs))
    unit, factor, digits = UNITS[found[0].family.metric]
    sizes = [abs(a.test.mean) for _, a in cells.values() if a.test is not None]
    margin = found[0].family.margin
    end = factor * min(12 * margin, max([4 * margin, *sizes]))
    norm, colours = TwoSlopeNorm(0.0, -end, end), plt.get_cmap(_COLOURS)
    figure: Figure
    with plt.rc_context({"font.size": 15, "hatch.linewidth": 1.0}):
        size = (4.2 + 2.9 * len(pairs), 3.0 + 0.95 * len(setups))
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        for y, setup in enumerate(setups):
            for x, pair in enumerate(pairs):
                if (setup, pair) in cells:
                    _draw(axis, x, y, cells[setup, pair][1], norm, colours, factor, digits)
                elif (setup, pair) in waiting:
                    one = waiting[setup, pair]
                    _blank(axis, x, y, f"{one.there} of {one.wanted}\nseeds")
                else:
                    _blank(axis, x, y, "", "white")
        axis.set(xlim=(-0.5, len(pairs) - 0.5), ylim=(len(setups) - 0.5, -0.5))
        axis.set_xticks(range(len(pairs)), pairs, fontsize=13)
        axis.set_yticks(range(len(setups)), setups)
        axis.xaxis.tick_top()
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        shown = plt.cm.ScalarMappable(norm, colours)
        figure.colorbar(shown, ax=axis, label=f"first better by ({unit})", shrink=0.8, extend="both")
        keys = [
            Patch(facecolor="white", edgecolor="#444444", hatch="///", label="undecided"),
            Patch(facecolor="white", edgecolor="black", linewidth=3, label=f"≈ equivalent (margin {_short(found)})"),
            Patch(facecolor="white", edgecolor="#bbbbbb", label="better or worse"),
        ]
        figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=13, frameon=False)
    _put(figure, path)


def _pair(answer: Answer) -> str:
    return f"{answer.question.first}\nagainst\n{answer.question.second}"


def _short(found: Sequence[Answers]) -> str:
    return " or ".join(dict.fromkeys(f"{one.family.margin * UNITS[one.family.metric][1]:g}" for one in found))


def _draw(axis: Any, x: int, y: int, a: Answer, norm: Any, colours: Any, factor: float, digits: int) -> None:
    if a.test is None:
        _blank(axis, x, y, "thrown\nout" if a.why.startswith("thrown") else "failed")
        return
    mean, half = factor * a.test.mean, factor * (a.test.high - a.test.low) / 2
    colour = colours(norm(mean))
    undecided, equivalent = a.verdict == "undecided", a.verdict == "equivalent"
    box = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=2)
    axis.add_patch(box)
    if undecided:
        axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="#777777", hatch="///", linewidth=0))
    if equivalent:
        axis.add_patch(Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, fill=False, edgecolor="black", linewidth=3))
    dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 0.5
    text = f"{'≈ ' if equivalent else ''}{mean:+.{digits - 1}f}\n± {half:.{digits - 1}f}"
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2} if undecided else None
    axis.text(x, y, text, ha="center", va="center", color="white" if dark and not undecided else "black", bbox=ground)


def _blank(axis: Any, x: int, y: int, words: str, colour: str = _EMPTY) -> None:
    axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
    axis.text(x, y, words, ha="center", va="center", color="#666666", fontsize=12)


def budgets(experiment: Experiment) -> dict[str, float]:
    """Label -> rho, of the GLoRAs in the experiment's first row axis, by falling rho."""
    found = {
        label: float(settings.get("rho") or settings.get("method.rho") or 1.0)
        for label, settings in experiment.axes[experiment.rows[0]].items()
        if settings.get("name", settings.get("method.name")) == "glora"
    }
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def plot_budgets(
    experiment: Experiment, scores: Scores, seeds: Sequence[int], setups: Sequence[str], path: Path | BinaryIO
) -> bool:
    """A panel a set-up: how much lower the log-loss is than the reference's, by rho, with a 95 % band (paired t);
    dashed and dotted lines are the other labels, which are no budget. False, and no picture, where there are fewer than
    two budgets."""
    reference, labels = experiment.reference, budgets(experiment)
    rows = experiment.axes[experiment.rows[0]]
    others = [label for label in rows if label not in labels and label != reference]
    panels = {setup: lines for setup in setups if len(lines := _lines(scores, seeds, setup, labels, reference)) > 1}
    if not panels or reference is None:
        return False
    figure: Figure
    with plt.rc_context({"font.size": 14}):
        columns = min(3, len(panels))
        size = (5.4 * columns, 4.2 * -(-len(panels) // columns) + 1.4)
        figure, axes = plt.subplots(
            -(-len(panels) // columns), columns, figsize=size, layout="constrained", squeeze=False, sharey=True
        )
        for axis, (setup, lines) in zip(axes.flat, panels.items(), strict=False):
            at = [labels[label] for label in lines]
            axis.plot(at, [mean for mean, _, _ in lines.values()], "o-", color=COLOURS[0], linewidth=2.5, label="GLoRA")
            low, high = ([one[k] for one in lines.values()] for k in (1, 2))
            axis.fill_between(at, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
            spread = max([abs(x) for line in lines.values() for x in line], default=0.0)
            for k, label in enumerate(others):
                found = _lines(scores, seeds, setup, {label: 0.0}, reference)
                if found and abs(found[label][0]) <= 3 * spread:  # a line far away would flatten the others
                    colour, style = COLOURS[1 + k % 6], ("--", ":")[k // 6 % 2]
                    axis.axhline(found[label][0], color=colour, linestyle=style, linewidth=2, label=label)
            axis.axhline(0, color="#444444", linewidth=1.2)
            axis.set(title=setup, xlabel="rho")
            axis.grid(alpha=0.3)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        axes[0][0].set_ylabel(f"nats better than\n{reference}")
        keys: dict[str, Any] = {}
        for axis in axes.flat:
            for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
                keys.setdefault(label, line)
        figure.legend(keys.values(), keys.keys(), loc="outside lower center", ncols=3, fontsize=12, frameon=False)
        figure.suptitle(f"Held-out log-loss against {reference}, mean of {len(seeds)} seeds, 95 % bands", fontsize=15)
    _put(figure, path)
    return True


def _lines(
    scores: Scores, seeds: Sequence[int], setup: str, labels: Mapping[str, float], reference: str | None
) -> dict[str, tuple[float, float, float]]:
    """Label -> (mean, low, high) of its gaps to the reference, of those that are there on all seeds."""
    found = {}
    for label in labels:
        theirs, ours = scores.get((reference or "", setup), {}), scores.get((label, setup), {})
        both = [s for s in seeds if "loss" in theirs.get(s, {}) and "loss" in ours.get(s, {})]
        gaps = [theirs[s]["loss"] - ours[s]["loss"] for s in both]
        if len(gaps) == len(seeds) > 1 and all(map(math.isfinite, gaps)):
            test = weigh(gaps, 1.0)
            found[label] = (fmean(gaps), test.low, test.high)
    return found


def _put(figure: Figure, path: Path | BinaryIO) -> None:
    if isinstance(path, Path):
        saved(figure, path)
        return
    figure.savefig(path, dpi=110)
    plt.close(figure)
