"""What several commands on Flower share."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.screen import complain, notes
from fedlora.errors import ConfigError

Folder = Annotated[Path, typer.Argument(help="the folder that `fedlora flower init` made", show_default=False)]


def needed() -> None:
    """Raises `ConfigError` where Flower is not installed."""
    try:
        version("flwr")
    except PackageNotFoundError as error:
        raise ConfigError("Flower is not installed: pip install 'fedlora[flower]'.") from error


@contextmanager
def ending_for_systemd() -> Iterator[None]:
    """What may be gone when it is started again ends with code 1: processes, memory, disks. Code 2 is left to what is
    wrong with the folder itself, after which systemd does not start it again."""
    try:
        yield
    except typer.Exit:
        raise
    except (RuntimeError, OSError, MemoryError) as error:
        raise typer.Exit(complain(str(error) or type(error).__name__) - 1) from error


def say(line: str) -> None:
    """A line on stderr at once, with the time unless systemd's journal adds it."""
    at = "" if "JOURNAL_STREAM" in os.environ else time.strftime("%H:%M:%S ")
    notes.print(f"{at}{line}")


def typed(path: str | Path) -> str:
    """A path as it stands in a command that is shown to be typed: quoted where a shell would part it."""
    return shlex.quote(str(path))
