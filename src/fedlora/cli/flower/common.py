"""What several Flower commands share."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.screen import complain
from fedlora.errors import ConfigError

Folder = Annotated[Path, typer.Argument(help="the folder that `fedlora flower init` made", show_default=False)]


def needed() -> None:
    """Raises `ConfigError` if Flower is not installed."""
    try:
        version("flwr")
    except PackageNotFoundError as error:
        raise ConfigError("Flower is not installed: pip install 'fedlora[flower]'.") from error


@contextmanager
def ending_for_systemd() -> Iterator[None]:
    """Exit with code 1 for problems that a restart may solve: processes, memory, disks. Code 2 is for errors in the
    folder itself; after it systemd does not restart the unit."""
    try:
        yield
    except typer.Exit:
        raise
    except (RuntimeError, OSError, MemoryError) as error:
        raise typer.Exit(complain(str(error) or type(error).__name__) - 1) from error


def typed(path: str | Path) -> str:
    """A path as typed in a command: quoted if a shell would split it."""
    return shlex.quote(str(path))
