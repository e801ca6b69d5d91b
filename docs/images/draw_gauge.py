"""Draw docs/images/gauge.svg: two updates, their mean, and the product of their mean factors.

    python docs/images/draw_gauge.py

A 2 x 2 matrix is drawn as what it makes of the unit square: its columns are the two arrows. The drawing holds its
matrices, from which docs/_static/gauge.js turns it.
"""

from __future__ import annotations

import json
from pathlib import Path

Matrix = list[list[float]]
B1, A1 = [[1.0, 0.3], [-0.2, 0.8]], [[0.9, 0.2], [-0.1, 1.0]]
B2, A2 = [[0.8, -0.1], [0.4, 1.0]], [[1.1, -0.3], [0.3, 0.7]]

UNIT, WIDTH, HEIGHT = 68, 215, 215  # of one panel
PANELS = (
    ("one", "update of site 1", "B₁ A₁", 0, 0),
    ("two", "update of site 2", "B₂ A₂", 1, 0),
    ("mean", "mean of the updates", "(B₁A₁ + B₂A₂) / 2", 0, 1),
    ("factors", "mean B times mean A", "(B₁+B₂)/2 · (A₁+A₂)/2", 1, 1),
)
STYLE = """
.gauge-ink { fill: var(--color-foreground-primary, #1f2328); }
.gauge-soft { fill: var(--color-foreground-secondary, #59636e); }
.gauge-axis { stroke: var(--color-foreground-border, #b0b7bf); stroke-width: 1; }
.gauge-good { fill: #2f81f7; stroke: #2f81f7; }
.gauge-bad { fill: #e8700c; stroke: #e8700c; }
.gauge-face { fill-opacity: 0.18; stroke-width: 2.5; stroke-linejoin: round; }
.gauge-truth { fill: none; stroke: #2f81f7; stroke-width: 2; stroke-dasharray: 5 4; }
@media (prefers-color-scheme: dark) {
  .gauge-ink { fill: var(--color-foreground-primary, #e6edf3); }
  .gauge-soft { fill: var(--color-foreground-secondary, #9198a1); }
  .gauge-axis { stroke: var(--color-foreground-border, #59636e); }
}
"""


def product(X: Matrix, Y: Matrix) -> Matrix:
    return [[sum(X[i][k] * Y[k][j] for k in range(2)) for j in range(2)] for i in range(2)]


def mean(X: Matrix, Y: Matrix) -> Matrix:
    return [[(X[i][j] + Y[i][j]) / 2 for j in range(2)] for i in range(2)]


def distance(X: Matrix, Y: Matrix) -> float:
    """Relative to Y, in the Frobenius norm."""
    apart = sum((X[i][j] - Y[i][j]) ** 2 for i in range(2) for j in range(2))
    return float((apart / sum(y * y for row in Y for y in row)) ** 0.5)


def points(M: Matrix) -> str:
    """Of the parallelogram: the origin, the first column, both, the second one. Up is up."""
    (a, b), (c, d) = M
    corners = [(0.0, 0.0), (a, c), (a + b, c + d), (b, d)]
    return " ".join(f"{UNIT * x:.1f},{-UNIT * y:.1f}" for x, y in corners)


def drawing() -> str:
    one, two = product(B1, A1), product(B2, A2)
    true, wrong = mean(one, two), product(mean(B1, B2), mean(A1, A2))
    shown = {"one": one, "two": two, "mean": true, "factors": wrong}
    parts = []
    for name, title, formula, column, row in PANELS:
        kind = "bad" if name == "factors" else "good"
        truth = f'<polygon class="gauge-truth" points="{points(true)}"/>' if name == "factors" else ""
        parts.append(
            f'<g transform="translate({column * WIDTH + 10} {row * HEIGHT})">'
            f'<text class="gauge-ink" x="0" y="18" font-size="15.5" font-weight="600">{title}</text>'
            f'<text class="gauge-soft" x="0" y="38" font-size="15">{formula}</text>'
            f'<g transform="translate(72 176)">'
            f'<path class="gauge-axis" d="M-62 0H125M0 28V-128" fill="none"/>'
            f'<polygon id="gauge-{name}" class="gauge-face gauge-{kind}" points="{points(shown[name])}"/>'
            f"{truth}</g></g>"
        )
    data = json.dumps({"B1": B1, "A1": A1, "B2": B2, "A2": A2, "unit": UNIT}).replace('"', "&quot;")
    off = f"{100 * distance(wrong, true):.0f} %"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + 10} {2 * HEIGHT + 28}" role="img" '
        f'aria-labelledby="gauge-title gauge-desc" font-family="system-ui, sans-serif" id="gauge-drawing" '
        f'data-matrices="{data}">'
        f'<title id="gauge-title">The mean of factors is not the mean of updates</title>'
        f'<desc id="gauge-desc">Four parallelograms, each what a 2 by 2 matrix makes of the unit square: the updates '
        f"of two sites, the mean of the updates, and the product of the mean factors. The last differs from the mean, "
        f"whose outline is dashed in it, by {off}; in other coordinates of site 1 it differs by as much as the mean is "
        f"large, while the other three stay.</desc><style>{STYLE}</style>{''.join(parts)}"
        f'<text class="gauge-ink" x="{WIDTH + 10}" y="{2 * HEIGHT + 14}" font-size="15">'
        f'off the mean by <tspan id="gauge-off" font-weight="600">{off}</tspan></text></svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_name("gauge.svg").write_text(drawing(), encoding="utf-8")
