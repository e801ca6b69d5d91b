"""`fedlora flower`: a federation on Flower. Each command has its own file, imported when the command is called."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.lazy import lazy_group
from fedlora.cli.screen import complain
from fedlora.errors import ConfigError

COMMANDS = {
    "init": "init:init", "admit": "init:admit", "remove": "init:remove", "renew": "init:renew",
    "serve": "serve:serve", "status": "serve:status", "up": "serve:up", "site": "site:site", "node": "site:node",
}  # fmt: skip
app = typer.Typer(
    cls=lazy_group(__name__, COMMANDS), help="A federation on Flower: SuperLink, SuperNodes, TLS.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(help="the folder that `fedlora flower init` made", show_default=False)]


@app.callback()
def _group() -> None: ...


def needed() -> None:
    """Raises `ConfigError` if Flower is not installed, or in a version whose inside nobody has looked at: what keeps
    other code from a site, and a site from answering for another, might be gone there without a word."""
    try:
        version("flwr")
    except PackageNotFoundError as error:
        raise ConfigError("Flower is not installed: pip install 'fedlora[flower]'.") from error
    try:
        from fedlora.flower.inside import untested
    except ImportError as error:
        raise ConfigError(f"flwr {version('flwr')} is not one that fedlora knows: {error}.") from error
    if why := untested():
        raise ConfigError(f"{why}.")


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
