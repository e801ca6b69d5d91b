"""Draw docs/images/times.svg from benchmarks/results/aggregation.json: what one aggregation takes, by method.

    python docs/images/draw_times.py

A dot is a method's time on a workload over that of GLoRA, both from raw uploads to the server's update.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

STORED = Path(__file__).parents[2] / "benchmarks" / "results" / "aggregation.json"
OURS = "GLoRA all-in, rho = 1"
SHOWN = (
    ("thin SVD all-in", "thin SVD", "#1a9c5b"),
    ("FlexLoRA dense, all-in", "FlexLoRA, dense SVD", "#e8700c"),
    ("peft, svd merge", "peft's svd merge", "#a259d9"),
)
LEFT, WIDTH, ROW, TOP = 118, 440, 38, 92
LEAST, MOST = 0.4, 1000.0
STYLE = """
.times-ink { fill: var(--color-foreground-primary, #1f2328); }
.times-soft { fill: var(--color-foreground-secondary, #59636e); }
.times-grid { stroke: var(--color-foreground-border, #b0b7bf); stroke-width: 1; opacity: 0.5; }
.times-one { stroke: #2f81f7; stroke-width: 2.5; }
@media (prefers-color-scheme: dark) {
  .times-ink { fill: var(--color-foreground-primary, #e6edf3); }
  .times-soft { fill: var(--color-foreground-secondary, #9198a1); }
}
"""


def ratios() -> dict[str, dict[str, float]]:
    """Workload -> method -> its time over GLoRA's."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))["workloads"]
    return {
        name: {label: held["rows"][row]["ms"] / held["rows"][OURS]["ms"] for row, label, _ in SHOWN}
        for name, held in stored.items()
    }


def across(ratio: float) -> float:
    """Where on the logarithmic axis."""
    share = math.log(ratio / LEAST) / math.log(MOST / LEAST)
    return LEFT + share * (WIDTH - LEFT - 26)


def drawing() -> str:
    found = ratios()
    height = TOP + ROW * len(found) + 34
    foot = TOP + ROW * len(found)
    parts = [f'<line class="times-one" x1="{across(1):.1f}" x2="{across(1):.1f}" y1="{TOP - 8}" y2="{foot}"/>']
    for ratio in (1, 10, 100, 1000):
        x = across(ratio)
        parts.append(f'<line class="times-grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{foot}"/>')
        parts.append(
            f'<text class="times-soft" x="{x:.1f}" y="{foot + 20}" font-size="14" text-anchor="middle">{ratio}x</text>'
        )
    keys = [("GLoRA (1x)", "#2f81f7"), *((label, colour) for _, label, colour in SHOWN)]
    for k, (label, colour) in enumerate(keys):
        x, y = 8 + 220 * (k % 2), 22 + 26 * (k // 2)
        parts.append(f'<circle cx="{x + 6}" cy="{y - 5}" r="6" fill="{colour}"/>')
        parts.append(f'<text class="times-ink" x="{x + 20}" y="{y}" font-size="15">{label}</text>')
    for k, (name, row) in enumerate(found.items()):
        y = TOP + ROW * k + 16
        short = name.replace("heavy tail, strong", "strong").replace("heavy tail", "heavy")
        parts.append(f'<text class="times-ink" x="4" y="{y + 5}" font-size="15">{short}</text>')
        for _, label, colour in SHOWN:
            parts.append(f'<circle cx="{across(row[label]):.1f}" cy="{y}" r="7" fill="{colour}" fill-opacity="0.85"/>')
    said = "; ".join(
        f"{name}: " + ", ".join(f"{label} {ratio:.3g}" for label, ratio in row.items()) for name, row in found.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="times-title times-desc" font-family="system-ui, sans-serif">'
        f'<title id="times-title">Time of one aggregation, in units of GLoRA\'s, by workload</title>'
        f'<desc id="times-desc">{said}.</desc><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_name("times.svg").write_text(drawing(), encoding="utf-8")
