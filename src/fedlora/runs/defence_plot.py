"""defence.png: what a robust rule did to each client, in the plane of their changes and round by round."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from fedlora.runs.drawing import COLOURS, WIDE

_NAMED = 12  # points with a name
_ROWS = 40  # clients of a heat map


def defence(lines: Sequence[Mapping[str, Any]], attackers: Collection[str]) -> Figure:
    """Above: the last round's clients as points in the plane of their changes' two leading directions, with the plain
    and the robust mean. Below: what each client's change counted for in each round, of its own weight. attackers: who
    lies on purpose."""
    last = lines[-1]
    judged, clients = last["defence"], last["defence"]["clients"]
    names = sorted({name for line in lines for name in line["defence"]["clients"]})
    figure: Figure
    heights = [6.4, max(3.6, 2.2 + 0.24 * min(len(names), _ROWS))]
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(WIDE, sum(heights)), layout="constrained", height_ratios=heights
    )
    gone = [name for name, one in clients.items() if one["after"] == 0]
    held = [name for name, one in clients.items() if 0 < one["after"] < 0.95 * one["before"]]
    for name, one in clients.items():
        out, size = name in gone, 30 + 500 * (one["before"] if name in gone else one["after"])
        upper.scatter(
            *one["at"], s=size, color=COLOURS[1 if out else 3 if name in held else 0], marker="X" if out else "o",
            alpha=0.75, linewidths=0, zorder=3,
        )  # fmt: skip
    points = {"no change": ((0.0, 0.0), "+", "#777777"), "plain mean": (judged["mean"], "s", COLOURS[4])}
    points |= {"robust mean": (judged["robust"], "*", COLOURS[2])}
    for label, (at, marker, colour) in points.items():
        upper.scatter(*at, s=110, marker=marker, color=colour, label=label, zorder=4)
    upper.scatter([], [], s=60, color=COLOURS[0], label="client, by its weight after")
    upper.scatter([], [], s=60, color=COLOURS[3], label="client held back")
    upper.scatter([], [], s=60, marker="X", color=COLOURS[1], label="client left out")
    upper.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    places = [one["at"] for one in clients.values()] + [at for at, _, _ in points.values()]
    room = 0.15 * max(max(x) - min(x) for x in zip(*places, strict=True))
    corners = [(min(x) - room, max(x) + room) for x in zip(*places, strict=True)]
    upper.scatter(*corners, alpha=0)  # room for names: "equal" takes no margin
    upper.axis("equal")
    upper.grid(alpha=0.3)
    upper.set(xlabel="first direction of the changes", ylabel="second direction")
    share = f"{judged['in_plane']:.0%} of all squared norms is in this plane"
    upper.set_title(f"round {last['round']}: {share}", fontsize=11)
    shown = names
    if len(names) > _ROWS:  # those that it took most from
        total = {n: sum(_multiplier(line, n) or 0.0 for line in lines) for n in names}
        shown = sorted(sorted(names, key=lambda name: (total[name], name))[:_ROWS])
    rows = [[math.nan if (m := _multiplier(line, n)) is None else min(m, 2.0) for line in lines] for n in shown]
    image = lower.imshow(rows, vmin=0, vmax=2, cmap="PuOr", aspect="auto", interpolation="nearest")
    lower.set_yticks(
        range(len(shown)), [name[:24] + (" (lies)" if name in attackers else "") for name in shown], fontsize=10
    )
    every = max(1, -(-len(lines) // 15))
    lower.set_xticks(range(0, len(lines), every), [str(line["round"]) for line in lines][::every])
    lower.set(xlabel="round")
    lower.set_title(judged["rule"])
    figure.colorbar(image, ax=lower, location="bottom", label="what a change counts for, of its weight (2: or more)")
    return figure


def names_of(line: Mapping[str, Any], attackers: Collection[str]) -> dict[str, tuple[float, float]]:
    """name -> place of the points that get one: all of few clients, of many those left out, where they are few."""
    clients = line["defence"]["clients"]
    gone = [name for name, one in clients.items() if one["after"] == 0]
    named = clients if len(clients) <= _NAMED else gone if len(gone) <= _NAMED else []
    return {name[:24] + (" (lies)" if name in attackers else ""): tuple(clients[name]["at"]) for name in named}


def name_points(figure: Figure, labels: Mapping[str, tuple[float, float]], judged: Mapping[str, Any]) -> None:
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
                    label, at, textcoords="offset points", xytext=shift, fontsize=10, zorder=5,
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
