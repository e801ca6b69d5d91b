"""What several commands on Flower share."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from fedlora.errors import ConfigError

Folder = Annotated[Path, typer.Argument(help="a folder of `fedlora flower init`", show_default=False)]


def needed() -> None:
    """Raises `ConfigError` where Flower is not installed."""
    try:
        version("flwr")
    except PackageNotFoundError as error:
        raise ConfigError("Flower is not installed: pip install 'fedlora[flower]'.") from error


def typed(path: str | Path) -> str:
    """A path as it stands in a command that is shown to be typed: quoted where a shell would part it."""
    return shlex.quote(str(path))
