"""Pictures of finished runs, from their result files only. Needs matplotlib (`fedlora[plot]`)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from fedlora.analysis.audit import Audit
from fedlora.core import files
from fedlora.runs.attack_words import in_words
from fedlora.runs.folder import RunFolder
from fedlora.runs.rank_profiles import RankType

# Okabe and Ito's palette: told apart by everybody, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def plot_run(folder: RunFolder) -> list[Path]:
    """metric.png, spectrum.png and bytes.png of a run, with a robust rule defence.png too, into its plots/. Returns
    what was written."""
    lines, summary = folder.metrics(), folder.read_json("summary.json")
    ranks = folder.read_json("manifest.json")["clients"]
    folder.plots.mkdir(exist_ok=True)
    figures, attackers = {}, (summary.get("attack") or {}).get("clients", ())
    if lines[0]["bytes"]:  # not of a private run
        figures["bytes"] = _bytes(lines)
    if judged := [line for line in lines if line.get("defence")]:
        figures["defence"] = _defence(judged, attackers)
    if any("singular_values" in facts for facts in summary["diagnostics"].values()):
        figures["spectrum"] = _spectrum(summary)
    figures["metric"] = _metric(lines, summary, ranks)  # the last: where it is, all are
    if attack := summary.get("attack"):
        for figure in figures.values():
            under_attack(figure, in_words(attack, len(ranks)))
    if judged:
        _name_points(figures["defence"], _names(judged[-1], attackers), judged[-1]["defence"])
    return [saved(figure, folder.plots / f"{name}.png") for name, figure in figures.items()]


def plot_ranks(profiles: Mapping[str, Mapping[RankType, int]], path: Path) -> Path:
    """How many clients of which rank, a panel for each profile."""
    columns = min(4, len(profiles))
    rows = -(-len(profiles) // columns)
    figure: Figure
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.2 * columns, 2.6 * rows + 0.4), layout="constrained", sharey=True, squeeze=False
    )
    for axis, (name, counts) in zip(axes.flat, profiles.items(), strict=False):
        bars = axis.bar([str(kind) for kind in counts], list(counts.values()), color=COLOURS[0], width=0.7)
        axis.bar_label(bars, fontsize=8)
        axis.set_title(name, fontsize=10)
        axis.margins(y=0.15)
    for axis in axes.flat[len(profiles) :]:
        axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("clients")
    figure.supxlabel("rank (attention/feed-forward where they differ)", fontsize=10)
    return saved(figure, path)


def plot_audit(audits: Sequence[Audit], path: Path) -> Path:
    """Three panels: how far each method's model moves in other coordinates, by how much it misses the true mean, and
    the movement by the condition of the coordinates. After the motivation figure of the GLoRA paper, third panel."""
    shown = [audit for audit in audits if audit.refused is None]
    figure: Figure
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(15, 1.6 + 0.34 * max(len(shown), 6)), layout="constrained", width_ratios=[1, 1, 1.1]
    )
    names = [audit.method for audit in shown]
    places = list(range(len(shown)))
    moved = [audit for audit in shown if audit.drift]
    at = _usual_condition(moved)
    for k, audit in enumerate(shown):
        if audit.drift is None or audit.readout_drift is None:
            why = "the mean is zero" if audit.zero_mean else "one factor travels: no gauge"
            left.text(2e-17, k, f" {why}", va="center", fontsize=8, color="#555555")
            continue
        left.barh(k - 0.19, _floored(audit.drift[at]), height=0.36, color=_verdict(audit.drift[at]))
        left.barh(
            k + 0.19,
            _floored(audit.readout_drift[at]),
            height=0.36,
            color=_verdict(audit.readout_drift[at]),
            alpha=0.45,
        )
    left.set(
        xscale="log", xlim=(1e-17, 30), xlabel="relative change", yticks=places,
        title=f"In other coordinates (condition {at:g})",
    )  # fmt: skip
    left.set_yticklabels(names)
    handles = [plt.Rectangle((0, 0), 1, 1, color="#777777", alpha=a) for a in (1, 0.45)]
    left.legend(handles, ["the server's model", "what clients get"], fontsize=8, loc="lower right")
    errors = [audit.error or 0.0 for audit in shown]
    middle.barh(places, [_floored(e) for e in errors], height=0.6, color=[_verdict(e) for e in errors])
    middle.set(
        xscale="log", xlim=(1e-17, 30), xlabel="relative error", yticks=places, title="Off the true mean update by"
    )
    middle.set_yticklabels([])
    for axis in (left, middle):
        axis.invert_yaxis()
        axis.grid(alpha=0.3, axis="x")
    for k, audit in enumerate(moved):
        assert audit.drift is not None
        style = ("-", "--", ":")[k // len(COLOURS) % 3]
        right.loglog(
            list(audit.drift), [_floored(x) for x in audit.drift.values()], style, marker="o", markersize=3,
            color=COLOURS[k % len(COLOURS)], label=audit.method,
        )  # fmt: skip
    right.set(
        xlabel="condition number of the coordinates", ylabel="relative change of the server's model", ylim=(1e-17, 30)
    )
    right.set_title("By how skewed the coordinates are")
    right.grid(alpha=0.3)
    if moved:
        right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return saved(figure, path)


def plot_overlaps(names: Sequence[str], overlaps: Mapping[str, Sequence[Sequence[float]]], path: Path) -> Path:
    """Heat maps of how much adapters' column spaces share: the mean over modules, and the pairs module by module."""
    count = len(names)
    pairs = [(i, j) for i in range(count) for j in range(i)]
    mean = [[sum(m[i][j] for m in overlaps.values()) / len(overlaps) for j in range(count)] for i in range(count)]
    by_module = [[m[i][j] for i, j in pairs] for m in overlaps.values()]
    figure: Figure
    height = max(3.6, 1.2 + 0.16 * len(overlaps))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(6 + 0.5 * len(pairs), height), layout="constrained", width_ratios=(1, 0.5 + 0.12 * len(pairs))
    )
    left.imshow(mean, vmin=0, vmax=1, cmap="viridis")
    left.set(title="mean over modules")
    left.set_xticks(range(count), [str(k + 1) for k in range(count)])
    left.set_yticks(range(count), [f"{k + 1} {name[:24]}" for k, name in enumerate(names)], fontsize=8)
    for i in range(count):
        for j in range(count):
            left.text(j, i, f"{mean[i][j]:.2f}", ha="center", va="center", color="w" if mean[i][j] < 0.6 else "k")
    image = right.imshow(by_module, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    right.set(title="module by module")
    right.set_xticks(range(len(pairs)), [f"{i + 1}-{j + 1}" for i, j in pairs], fontsize=7, rotation=90)
    right.set_yticks(range(len(overlaps)), [_short(module) for module in overlaps], fontsize=6)
    figure.colorbar(image, ax=right, label="shared column space (1: one lies in the other)")
    return saved(figure, path)


def _usual_condition(audits: Sequence[Audit]) -> float:
    conditions = [c for audit in audits for c in audit.drift or ()]
    return 10.0 if 10.0 in conditions or not conditions else conditions[-1]


def _floored(x: float) -> float:
    """Something to see on a log axis for what is zero to the last bit."""
    return max(x, 3e-17)


def _verdict(x: float) -> str:
    return COLOURS[1] if x > 1e-3 else COLOURS[0]


def _metric(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], ranks: Mapping[str, int]) -> Figure:
    figure: Figure
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    metric = summary["metric"]
    scored = [line for line in lines if line["metrics"]]
    rounds = [line["round"] for line in scored]
    left.plot(rounds, [line["metrics"][metric] for line in scored], marker="o", color=COLOURS[0], label="validation")
    ends = {"last": lines[-1]["round"], "best": summary["best_round"]}
    for marker, (name, round) in zip("sD", ends.items(), strict=True):
        if summary["test"][name]:
            which = f"test, {name} round{' by validation' if name == 'best' else ''}"
            left.plot([round], [summary["test"][name][metric]], marker, color=COLOURS[1], label=which)
    left.set(xlabel="round", ylabel=words(metric))
    left.set_title(f"{summary['method']}: held-out {words(metric)} ({summary['target']})")
    left.legend()
    clients = sorted({client for line in lines for client in line["losses"]})
    if not clients:  # a private run tells of none
        right.set_axis_off()
        return _gridded(figure, left)
    for colour, client in zip(COLOURS * len(clients), clients, strict=False):
        points = [(line["round"], line["losses"].get(client)) for line in lines]
        points = [(round, loss) for round, loss in points if loss is not None]
        label = f"{client}, rank {ranks[client]}" if len(clients) <= 10 else None
        right.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, alpha=0.9, label=label)
    right.set(xlabel="round", ylabel="mean training loss", title=f"{len(clients)} clients' own data")
    if len(clients) <= 10:
        right.legend(fontsize=8)
    return _gridded(figure, left, right)


def _gridded(figure: Figure, *axes: Any) -> Figure:
    for axis in axes:
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
    if all(facts.get("union_rank") is not None for facts in diagnostics.values()):  # else not counted
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


_NAMED = 12  # points with a name
_ROWS = 40  # clients of a heat map


def _defence(lines: Sequence[Mapping[str, Any]], attackers: Collection[str]) -> Figure:
    """Left: the last round's clients as points in the plane of their changes' two leading directions, with the plain
    and the robust mean. Right: what each client's change counted for in each round, of its own weight. attackers: who
    lies on purpose."""
    last = lines[-1]
    judged, clients = last["defence"], last["defence"]["clients"]
    names = sorted({name for line in lines for name in line["defence"]["clients"]})
    figure: Figure
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, max(4.6, 1.6 + 0.24 * min(len(names), _ROWS))), layout="constrained", width_ratios=(1.15, 1)
    )
    gone = [name for name, one in clients.items() if one["after"] == 0]
    held = [name for name, one in clients.items() if 0 < one["after"] < 0.95 * one["before"]]
    for name, one in clients.items():
        out, size = name in gone, 30 + 500 * (one["before"] if name in gone else one["after"])
        left.scatter(
            *one["at"], s=size, color=COLOURS[1 if out else 3 if name in held else 0], marker="X" if out else "o",
            alpha=0.75, linewidths=0, zorder=3,
        )  # fmt: skip
    points = {"no change": ((0.0, 0.0), "+", "#777777"), "plain mean": (judged["mean"], "s", COLOURS[4])}
    points |= {"robust mean": (judged["robust"], "*", COLOURS[2])}
    for label, (at, marker, colour) in points.items():
        left.scatter(*at, s=110, marker=marker, color=colour, label=label, zorder=4)
    left.scatter([], [], s=60, color=COLOURS[0], label="client, by its weight after")
    left.scatter([], [], s=60, color=COLOURS[3], label="client held back")
    left.scatter([], [], s=60, marker="X", color=COLOURS[1], label="client left out")
    left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)
    places = [one["at"] for one in clients.values()] + [at for at, _, _ in points.values()]
    room = 0.15 * max(max(x) - min(x) for x in zip(*places, strict=True))
    corners = [(min(x) - room, max(x) + room) for x in zip(*places, strict=True)]
    left.scatter(*corners, alpha=0)  # room for names: "equal" takes no margin
    left.axis("equal")
    left.grid(alpha=0.3)
    left.set(xlabel="first direction of the changes", ylabel="second direction")
    share = f"{judged['in_plane']:.0%} of all squared norms is in this plane"
    left.set_title(f"Round {last['round']}: {share}", fontsize=10)
    shown = names
    if len(names) > _ROWS:  # those that it took most from
        total = {n: sum(_multiplier(line, n) or 0.0 for line in lines) for n in names}
        shown = sorted(sorted(names, key=lambda name: (total[name], name))[:_ROWS])
    rows = [[math.nan if (m := _multiplier(line, n)) is None else min(m, 2.0) for line in lines] for n in shown]
    image = right.imshow(rows, vmin=0, vmax=2, cmap="PuOr", aspect="auto", interpolation="nearest")
    right.set_yticks(
        range(len(shown)), [name[:24] + (" (lies)" if name in attackers else "") for name in shown], fontsize=7
    )
    every = max(1, -(-len(lines) // 15))
    right.set_xticks(range(0, len(lines), every), [str(line["round"]) for line in lines][::every])
    right.set(xlabel="round")
    right.set_title(judged["rule"], fontsize=10)
    figure.colorbar(image, ax=right, label="m: what a change counts for, of its weight (2: or more)")
    return figure


def _names(line: Mapping[str, Any], attackers: Collection[str]) -> dict[str, tuple[float, float]]:
    """name -> place of the points that get one: all of few clients, of many those left out, where they are few."""
    clients = line["defence"]["clients"]
    gone = [name for name, one in clients.items() if one["after"] == 0]
    named = clients if len(clients) <= _NAMED else gone if len(gone) <= _NAMED else []
    return {name[:24] + (" (lies)" if name in attackers else ""): tuple(clients[name]["at"]) for name in named}


def _name_points(figure: Figure, labels: Mapping[str, tuple[float, float]], judged: Mapping[str, Any]) -> None:
    """Names beside points, none over another or over a point, all inside the axes: each at the nearest free place, with
    a line to its point where that is not beside it."""
    axis, canvas = figure.axes[0], FigureCanvasAgg(figure)
    canvas.draw()  # places are known from here on
    figure.set_layout_engine("none")
    frame, renderer = axis.get_window_extent(), canvas.get_renderer()
    marks = [*labels.values(), judged["mean"], judged["robust"], (0.0, 0.0)]
    taken = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in (axis.transData.transform(at) for at in marks)]
    for label, at in labels.items():
        best = None
        for reach in (12, 22, 36, 54, 76, 100):
            for turn in range(16):
                angle = math.tau * turn / 16 + math.pi / 5
                shift = (reach * math.cos(angle), 0.7 * reach * math.sin(angle))
                text = axis.annotate(
                    label, at, textcoords="offset points", xytext=shift, fontsize=8, zorder=5,
                    ha="left" if shift[0] >= 0 else "right", va="center",
                    arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.6} if reach > 20 else None,
                )  # fmt: skip
                text.update_positions(renderer)
                box = Text.get_window_extent(text, renderer)
                inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
                if inside and not any(box.overlaps(other) for other in taken):
                    best = box
                    break
                text.remove()
            if best is not None:
                taken.append(best)
                break


def _multiplier(line: Mapping[str, Any], name: str) -> float | None:
    one = line["defence"]["clients"].get(name)
    return None if one is None else float(one["after"] / one["before"])


def under_attack(figure: Figure, what: str) -> None:
    """Says above a picture that its clients lied on purpose; below what stands there already."""
    title = figure.get_suptitle()
    said = textwrap.wrap(f"UNDER ATTACK, on purpose: {what}. Not for use.", int(13 * figure.get_figwidth()))
    more = said[:3] + (["..."] if len(said) > 3 else [])
    figure.suptitle("\n".join([*([title] if title else []), *more]), color="#a00000", fontsize=10, fontweight="bold")


def words(metric: str) -> str:
    return metric.replace("rouge_l", "ROUGE-L").replace("_", " ")


def _short(module: str) -> str:
    """encoder.layer.3.attention.self.query -> 3.query."""
    parts = module.split(".")
    return ".".join([*(part for part in parts[:-1] if part.isdigit()), parts[-1]])


def saved(figure: Figure, path: Path) -> Path:
    """The figure as a file, whole or not at all; returns where: a name without an ending gets matplotlib's own."""
    kind = path.suffix.removeprefix(".") or plt.rcParams["savefig.format"]
    path = path if path.suffix else path.with_name(f"{path.name}.{kind}")
    try:
        with files.replacing(path) as file:
            figure.savefig(file, dpi=130, format=kind)
    finally:
        plt.close(figure)
    return path
