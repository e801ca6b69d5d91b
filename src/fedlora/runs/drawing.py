"""Shared by all pictures: colours, letters legible at 400 pixels, and writing a picture to a file.

Every picture records that fedlora drew it, and a command overwrites no other; a run's own `plots/` need no such mark.
Only drawing code imports matplotlib; whether a file may be written is checked before the work.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlora.core import files
from fedlora.core.text import shown
from fedlora.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

os.environ.setdefault("MPLBACKEND", "Agg")  # opens no window
MARK = "drawn by fedlora"
_KEYS = {"png": "Software", "svg": "Creator", "pdf": "Creator", "ps": "Creator", "eps": "Creator"}
# Okabe and Ito's palette: distinguishable for everybody, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
WIDE = 6.6  # inches, with 12-point letters: 10 pixels high in a picture shown 400 pixels wide
LETTERS = {"font.size": 12, "axes.titlesize": 12.5, "axes.titleweight": "bold", "legend.fontsize": 11}


def gridded(figure: Figure, *axes: Any) -> Figure:
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def under_attack(figure: Figure, what: str) -> None:
    """Add a title saying that the clients were byzantine on purpose, below any existing one."""
    title = figure.get_suptitle()
    lines = textwrap.wrap(f"UNDER ATTACK, on purpose: {what}. Not for use.", int(13 * figure.get_figwidth()))
    lines = lines[:3] + (["..."] if len(lines) > 3 else [])
    figure.suptitle("\n".join([*([title] if title else []), *lines]), color="#a00000", fontsize=10, fontweight="bold")


def words(metric: str) -> str:
    return metric.replace("rouge_l", "ROUGE-L").replace("_", " ")


def short(module: str) -> str:
    """encoder.layer.3.attention.self.query -> 3.query."""
    parts = module.split(".")
    return ".".join([*(part for part in parts[:-1] if part.isdigit()), parts[-1]])


def saved(figure: Figure, path: Path) -> Path:
    """Write the figure atomically; return its path. A name without suffix gets matplotlib's default."""
    import matplotlib.pyplot as plt

    kind = path.suffix.removeprefix(".") or plt.rcParams["savefig.format"]
    path = path if path.suffix else path.with_name(f"{path.name}.{kind}")
    try:
        with files.replacing(path) as file:
            figure.savefig(file, dpi=130, format=kind, metadata={_KEYS[kind]: MARK} if kind in _KEYS else None)
    finally:
        plt.close(figure)
    return path


def check_picture(path: Path) -> None:
    """Check that a picture may be written here: the place is free, or holds one that fedlora drew.

    Raises:
        ConfigError: another file is there, or a directory.
    """
    path = path if path.suffix else path.with_name(f"{path.name}.png")
    try:
        ours = not path.exists() or (path.is_file() and MARK.encode() in path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{shown(path)} cannot be written: {error.strerror or error}.") from error
    if not ours:
        what = "is a directory" if path.is_dir() else "exists, and fedlora did not draw it"
        raise ConfigError(f"{shown(path)} {what}: it is not replaced. Name another file with --plot, or move it.")
