"""Pictures of finished runs, from their result files only. Needs matplotlib (`fedlora[plot]`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.run_folder import RunFolder

# Okabe and Ito's palette: told apart by everybody, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def plot_run(folder: RunFolder) -> list[Path]:
    """metric.png, spectrum.png and bytes.png of a run, into its plots/. Returns what was written."""
    lines, summary = folder.metrics(), folder.read_json("summary.json")
    ranks = folder.read_json("manifest.json")["clients"]
    folder.plots.mkdir(exist_ok=True)
    figures = {"metric": _metric(lines, summary, ranks), "bytes": _bytes(lines)}
    if any("singular_values" in facts for facts in summary["diagnostics"].values()):
        figures["spectrum"] = _spectrum(summary)
    return [_saved(figure, folder.plots / f"{name}.png") for name, figure in figures.items()]


def plot_comparison(runs: Mapping[str, RunFolder], path: Path) -> Path:
    """The validation accuracy by round of several methods, over the same clients and seeds."""
    figure: Figure
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for colour, (name, folder) in zip(COLOURS * len(runs), runs.items(), strict=False):
        scored = [line for line in folder.metrics() if line["metrics"]]
        axis.plot(
            [line["round"] for line in scored],
            [line["metrics"]["accuracy"] for line in scored],
            marker="o",
            markersize=3.5,
            color=colour,
            label=f"{name} ({folder.read_json('summary.json')['target']})",
        )
    axis.set(xlabel="round", ylabel="validation accuracy", title="Same clients, data and seeds")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return _saved(figure, path)


def _metric(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], ranks: Mapping[str, int]) -> Figure:
    figure: Figure
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    scored = [line for line in lines if line["metrics"]]
    rounds = [line["round"] for line in scored]
    left.plot(
        rounds, [line["metrics"]["accuracy"] for line in scored], marker="o", color=COLOURS[0], label="validation"
    )
    ends = {"last": lines[-1]["round"], "best": summary["best_round"]}
    for marker, (name, round) in zip("sD", ends.items(), strict=True):
        if summary["test"][name]:
            which = f"test, {name} round{' by validation' if name == 'best' else ''}"
            left.plot([round], [summary["test"][name]["accuracy"]], marker, color=COLOURS[1], label=which)
    left.set(xlabel="round", ylabel="accuracy", title=f"{summary['method']}: held-out accuracy ({summary['target']})")
    left.legend()
    clients = sorted({client for line in lines for client in line["losses"]})
    for colour, client in zip(COLOURS * len(clients), clients, strict=False):
        points = [(line["round"], line["losses"].get(client)) for line in lines]
        points = [(round, loss) for round, loss in points if loss is not None]
        label = f"{client}, rank {ranks[client]}" if len(clients) <= 10 else None
        right.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, alpha=0.9, label=label)
    right.set(xlabel="round", ylabel="mean training loss", title=f"{len(clients)} clients' own data")
    if len(clients) <= 10:
        right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _spectrum(summary: Mapping[str, Any]) -> Figure:
    diagnostics = summary["diagnostics"]
    figure: Figure
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    shades = plt.get_cmap("viridis")
    for k, facts in enumerate(diagnostics.values()):
        values = facts.get("singular_values") or []
        left.semilogy(range(1, len(values) + 1), values, color=shades(k / max(len(diagnostics) - 1, 1)), linewidth=1)
    left.set(xlabel="component", ylabel="singular value of the server's update", title="Spectrum, a line a module")
    names = [_short(name) for name in diagnostics]
    places = range(len(names))
    if all("server_rank" in facts for facts in diagnostics.values()):
        right.barh(places, [f["server_rank"] for f in diagnostics.values()], color="#dddddd", label="budget R")
        right.barh(
            places, [f["union_rank"] for f in diagnostics.values()], color=COLOURS[5], height=0.55, label="union rank"
        )
    right.barh(
        places, [f["rank"] for f in diagnostics.values()], color=COLOURS[0], height=0.25, label="rank of the update"
    )
    right.set_yticks(places, names, fontsize=7)
    right.invert_yaxis()
    right.set(xlabel="rank", title="Rank by module")
    right.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, -0.3), ncols=3, frameon=False)
    left.grid(alpha=0.3)
    return figure


def _bytes(lines: Sequence[Mapping[str, Any]]) -> Figure:
    figure: Figure
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    rounds = [line["round"] for line in lines]
    parts = [key for key in lines[0]["bytes"] if key != "total" and any(line["bytes"][key] for line in lines)]
    base = [0.0] * len(lines)
    for colour, part in zip(COLOURS, parts, strict=False):
        size = [line["bytes"][part] / 1e6 for line in lines]
        axis.bar(rounds, size, bottom=base, color=colour, width=0.7, label=part.replace("_", ", "))
        base = [b + s for b, s in zip(base, size, strict=True)]
    axis.set(xlabel="round", ylabel="MB, all clients together", title="What travels (tensor bytes)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, -0.28), ncols=len(parts), frameon=False)
    return figure


def _short(module: str) -> str:
    """encoder.layer.3.attention.self.query -> 3.query."""
    parts = module.split(".")
    return ".".join([*(part for part in parts[:-1] if part.isdigit()), parts[-1]])


def _saved(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
