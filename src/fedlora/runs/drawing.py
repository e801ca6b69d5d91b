"""What every picture shares: colours, letters that are read at 400 pixels, and how a picture becomes a file."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedlora.core import files
from fedlora.runs.picture_mark import metadata

# Okabe and Ito's palette: told apart by everybody, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
WIDE = 6.6  # inches, with letters of 12 points: shown 400 pixels wide, these are 10 pixels high
LETTERS = {"font.size": 12, "axes.titlesize": 12.5, "axes.titleweight": "bold", "legend.fontsize": 11}


def gridded(figure: Figure, *axes: Any) -> Figure:
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def under_attack(figure: Figure, what: str) -> None:
    """Says above a picture that its clients lied on purpose; below what stands there already."""
    title = figure.get_suptitle()
    said = textwrap.wrap(f"UNDER ATTACK, on purpose: {what}. Not for use.", int(13 * figure.get_figwidth()))
    more = said[:3] + (["..."] if len(said) > 3 else [])
    figure.suptitle("\n".join([*([title] if title else []), *more]), color="#a00000", fontsize=10, fontweight="bold")


def words(metric: str) -> str:
    return metric.replace("rouge_l", "ROUGE-L").replace("_", " ")


def short(module: str) -> str:
    """encoder.layer.3.attention.self.query -> 3.query."""
    parts = module.split(".")
    return ".".join([*(part for part in parts[:-1] if part.isdigit()), parts[-1]])


def saved(figure: Figure, path: Path) -> Path:
    """The figure as a file, whole or not at all; returns where: a name without an ending gets matplotlib's own."""
    kind = path.suffix.removeprefix(".") or plt.rcParams["savefig.format"]
    path = path if path.suffix else path.with_name(f"{path.name}.{kind}")
    try:
        with files.replacing(path) as file:
            figure.savefig(file, dpi=130, format=kind, metadata=metadata(kind))
    finally:
        plt.close(figure)
    return path
