"""Which pictures are ours: each says in its file that fedlora drew it, and a command writes over no other.

A run's own `plots/` need no mark: their place says whose they are. Needs no matplotlib: it is asked before the work.
"""

from __future__ import annotations

from pathlib import Path

from fedlora.core.echo import shown
from fedlora.errors import ConfigError

MARK = "drawn by fedlora"
_KEYS = {"png": "Software", "svg": "Creator", "pdf": "Creator", "ps": "Creator", "eps": "Creator"}


def metadata(kind: str) -> dict[str, str] | None:
    """What matplotlib is to write into a picture of this kind; None where the kind holds no words."""
    return {_KEYS[kind]: MARK} if kind in _KEYS else None


def check_picture(path: Path) -> None:
    """May a picture be drawn here? Where nothing is, and over what fedlora drew.

    Raises:
        ConfigError: another file is there, or a directory.

    Example:
        >>> _ = Path("figure.png").write_bytes(b"of a paper")
        >>> try:
        ...     check_picture(Path("figure.png"))
        ... except ConfigError as error:
        ...     print(str(error).partition(":")[0])
        figure.png is there, and fedlora did not draw it
    """
    path = path if path.suffix else path.with_name(f"{path.name}.png")
    try:
        ours = not path.exists() or (path.is_file() and MARK.encode() in path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{shown(path)} cannot be written: {error.strerror or error}.") from error
    if not ours:
        what = "is a directory" if path.is_dir() else "is there, and fedlora did not draw it"
        raise ConfigError(f"{shown(path)} {what}: it is not replaced. Name another file with --plot, or move it.")
