"""audit.png: how much each method's result changes with the coordinates, and its error against the true mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fedlora.analysis.audit import Audit
from fedlora.runs.drawing import COLOURS, LETTERS, saved

_FLOOR = 1e-17  # the axes' start; smaller values, including zero, are drawn there
_FAR = 1e-3  # larger values are errors, not round-off


def plot_audit(audits: Sequence[Audit], path: Path) -> Path:
    """Bars for change and error, with values. After the third panel of the GLoRA paper's motivation figure."""
    shown = [audit for audit in audits if audit.refused is None]
    conditions = [c for audit in shown for c in audit.drift or ()]
    at = 10.0 if 10.0 in conditions or not conditions else conditions[-1]  # as in the table
    with plt.rc_context({**LETTERS, "font.size": 14, "axes.titlesize": 14.5, "legend.fontsize": 13}):
        figure: Figure
        figure, (left, right) = plt.subplots(
            1, 2, sharey=True, figsize=(8.4, 1.6 + 0.55 * max(len(shown), 2)), layout="constrained"
        )
        for k, audit in enumerate(shown):
            if audit.drift is None or audit.readout_drift is None:
                left.text(_FLOOR * 2, k, "one factor travels", va="center", fontsize=12, color="#555555")
            else:
                _bar(left, k - 0.2, audit.drift[at], 0.38)
                _bar(left, k + 0.2, audit.readout_drift[at], 0.38, alpha=0.4)
            _bar(right, k, audit.error or 0.0, 0.6)
        left.set_yticks(range(len(shown)), [audit.method for audit in shown])
        left.set_title(f"moves in other coordinates\n(condition {at:g})")
        right.set_title("off the true mean\nof the updates by")
        for axis in (left, right):
            axis.set(xscale="log", xlim=(_FLOOR, 1e6), ylim=(max(len(shown), 1) - 0.5, -0.5))
            axis.set_xticks([1e-16, 1e-8, 1], [r"$10^{-16}$", r"$10^{-8}$", "1"])
            axis.grid(alpha=0.3, axis="x")
        figure.supxlabel("relative change; log axes that begin at 1e-17", fontsize=13)
        _key(figure)
        return saved(figure, path)


def _key(figure: Any) -> None:
    kinds = {
        "round-off": (COLOURS[0], 1), "more than 0.1 %": (COLOURS[1], 1), "the server's model": ("#555555", 1),
        "what clients get": ("#555555", 0.4),
    }  # fmt: skip
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour, alpha=alpha) for colour, alpha in kinds.values()]
    figure.legend(handles, list(kinds), loc="outside upper center", ncols=2, frameon=False)


def _bar(axis: Any, place: float, value: float, height: float, alpha: float = 1.0) -> None:
    """A bar labelled with its value: round-off as a power of ten, larger values as a percentage."""
    end = min(max(value, _FLOOR), 1e6)  # the axis' ends
    axis.barh(place, end, height=height, color=COLOURS[1] if value > _FAR else COLOURS[0], alpha=alpha, zorder=2)
    label = f"{value:.0%}" if value > 0.1 else f"{value:.1%}" if value > _FAR else f"{value:.0e}" if value else "0"
    axis.annotate(label, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=12)
