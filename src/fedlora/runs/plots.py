"""Pictures of finished runs, from their result files only. Needs matplotlib (`fedlora[plot]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fedlora.errors import counted
from fedlora.runs.attack_words import in_words
from fedlora.runs.audit_plot import plot_audit
from fedlora.runs.drawing import COLOURS, LETTERS, WIDE, gridded, saved, short, under_attack, words
from fedlora.runs.folder import RunFolder
from fedlora.training.metrics import by_guessing

__all__ = ["plot_audit", "plot_run"]


def plot_run(folder: RunFolder) -> list[Path]:
    """Draw a run's metric.png and spectrum.png into plots/. Returns the files written."""
    lines, summary = folder.metrics(), folder.read_json("summary.json")
    manifest = folder.read_json("manifest.json")
    ranks = manifest["clients"]
    folder.plots.mkdir(exist_ok=True)
    figures = {}
    with plt.rc_context(LETTERS):
        if any("singular_values" in facts for facts in summary["diagnostics"].values()):
            figures["spectrum"] = _spectrum(summary)
        chance = by_guessing(summary["metric"], len(manifest["data"]["label_names"]))
        figures["metric"] = _metric(lines, summary, ranks, chance)  # written last: if it exists, all do
    if attack := summary.get("attack"):
        for figure in figures.values():
            under_attack(figure, in_words(attack, len(ranks)))
    with plt.rc_context(LETTERS):  # tick labels are created when drawing
        return [saved(figure, folder.plots / f"{name}.png") for name, figure in figures.items()]


def _metric(
    lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], ranks: Mapping[str, int], chance: float | None
) -> Figure:
    """Above, the held-out score by round with test scores and chance level; below, the clients' losses."""
    metric, clients = summary["metric"], sorted({client for line in lines for client in line["losses"]})
    figure: Figure
    figure, axes = plt.subplots(1 + bool(clients), 1, figsize=(WIDE, 4.2 * (1 + bool(clients))), layout="constrained")
    upper = axes[0] if clients else axes
    scored = [line for line in lines if line["metrics"]]
    upper.plot(
        [line["round"] for line in scored], [line["metrics"][metric] for line in scored], "o-", color=COLOURS[0],
        label="validation",
    )  # fmt: skip
    last, best = lines[-1]["round"], summary["best_round"]
    ends = {"test, last and best round": ("best", best)} if last == best else {
        "test, last round": ("last", last), "test, best round": ("best", best)
    }  # fmt: skip
    for marker, (label, (which, round)) in zip("DX", ends.items(), strict=False):
        if summary["test"][which]:
            at = summary["test"][which][metric]
            upper.plot([round], [at], marker, color=COLOURS[1], markersize=10, label=f"{label}: {at:.3f}", zorder=3)
    if chance is not None:
        upper.axhline(chance, color="#777777", linestyle=":", label=f"guessing: {chance:.3f}")
    upper.set(xlabel="round", ylabel=words(metric), xlim=(lines[0]["round"] - 0.3, last + 0.3))  # as the losses below
    upper.set_title(f"{summary['method']}: held-out {words(metric)} ({summary['target']})")
    upper.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    if not clients:  # a private run reports none
        return gridded(figure, upper)
    _losses(axes[1], lines, clients, ranks)
    return gridded(figure, upper, axes[1])


def _losses(axis: Any, lines: Sequence[Mapping[str, Any]], clients: Sequence[str], ranks: Mapping[str, int]) -> None:
    """One line per client; if there are few, a legend below the picture names them."""
    few = len(clients) <= 10
    for k, client in enumerate(clients):
        points = [(line["round"], line["losses"].get(client)) for line in lines]
        points = [(round, loss) for round, loss in points if loss is not None]
        style = ("-", "--")[k // len(COLOURS) % 2]
        label = f"{client}, rank {ranks[client]}" if few else None
        axis.plot(*zip(*points, strict=True), style, color=COLOURS[k % len(COLOURS)], linewidth=1.8, label=label)
    axis.set(
        xlabel="round", ylabel="mean training loss", title=f"{counted(len(clients), 'client')}, each on its own data"
    )
    if few:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)


_RANKS = {"server_rank": "budget R", "union_rank": "union rank", "rank": "rank of the update"}


def _spectrum(summary: Mapping[str, Any]) -> Figure:
    """Singular values, one line per module; below, the modules' ranks in words."""
    diagnostics, shades = summary["diagnostics"], plt.get_cmap("viridis")
    figure: Figure
    figure, axis = plt.subplots(figsize=(WIDE, 4.6), layout="constrained")
    for k, (name, facts) in enumerate(diagnostics.items()):
        values, first_or_last = facts.get("singular_values") or [], k in (0, len(diagnostics) - 1)
        axis.semilogy(
            range(1, len(values) + 1), values, color=shades(0.9 * k / max(len(diagnostics) - 1, 1)),
            linewidth=3 if first_or_last else 1.2, label=short(name) if first_or_last else None,
        )  # fmt: skip
    known = {words: [facts.get(key) for facts in diagnostics.values()] for key, words in _RANKS.items()}
    ends = {words: dict.fromkeys((min(v), max(v))) for words, v in known.items() if None not in v}  # None: not counted
    ranks = ", ".join(f"{words} {' to '.join(map(str, both))}" for words, both in ends.items())
    axis.set(xlabel=f"component\n{ranks} in {counted(len(diagnostics), 'module')}", ylabel="singular value")
    axis.set_title("spectrum of the server's update, one line per module")
    axis.legend(title="first and last module", loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, frameon=False)
    axis.grid(alpha=0.3)
    return figure
