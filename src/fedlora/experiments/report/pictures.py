"""Pictures for the page: matplotlib figures as SVG inside the HTML, in the page's font and its light or dark colours.

A figure is drawn in the colours below. Inside the page each of them becomes a CSS variable, so that one drawing serves
both; as a file it is what was drawn. Other colours, as those of a heat map, stay.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fedlora.runs.drawing import COLOURS

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
